"""Ordinary differential equations through torchdiffeq, which is imported when one is solved."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from lineardiff.generation.noise import Callback, check_name

OdeMethod = Literal["euler", "midpoint", "heun", "dopri5"]
State = TypeVar("State", Tensor, tuple[Tensor, ...])


class _Field:
    """The right-hand side, which is also where torchdiffeq looks for a callback."""

    def __init__(self, derivative: Callable[..., Any], report: Callable[[float], None]) -> None:
        self.derivative = derivative
        self.report = report

    def __call__(self, t: Tensor, state: Any) -> Any:
        return self.derivative(t, state)

    def callback_step(self, t: Tensor, state: Any, dt: Tensor) -> None:
        self.report(float(t))


@torch.no_grad()
def solve_ode(
    derivative: Callable[[Tensor, State], State],
    state: State,
    *,
    interval: tuple[float, float],
    method: OdeMethod = "dopri5",
    num_steps: int | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-3,
    callback: Callback | None = None,
) -> State:
    """The state at the end of an interval.

    Args:
        derivative: Of (t: scalar, state), of the form of the state.
        state: A tensor or a tuple of tensors, at the interval's first time.
        interval: (first, last) time, in either order.
        method: "euler" (one evaluation a step), "midpoint" or "heun" (two: the trapezoid), with steps of equal
            length; or "dopri5", which chooses its steps by the tolerances.
        num_steps: Steps of a method with equal steps, 50 where None; dopri5 takes None alone.
        atol, rtol: Tolerances of dopri5.
        callback: Called with (step, total); total is num_steps, or 100 with dopri5, whose steps are not known
            beforehand: (percentage of the interval, 100).

    dopri5 judges a step by the error over the whole state at once, so its steps, and within the tolerances its
    results, depend on the samples that are integrated together. Its last step runs past the end, the state there
    being interpolated: the derivative must be finite beyond. The other methods treat each sample alone.

    Raises:
        ImportError: torchdiffeq is not installed.
        ValueError: An unknown method; `num_steps` below 1, or given to dopri5.
    """
    try:
        from torchdiffeq import odeint
    except ImportError as error:
        raise ImportError("the ODE needs torchdiffeq: pip install 'lineardiff[generate]'") from error
    check_name("ODE method", method, get_args(OdeMethod))
    if method == "dopri5" and num_steps is not None:
        raise ValueError(
            f"num_steps={num_steps}: dopri5 chooses its steps; leave num_steps out and set atol and rtol"
        )
    num_steps = 50 if num_steps is None else num_steps
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps}: expected at least 1")
    first, last = interval
    total = 100 if method == "dopri5" else num_steps
    done = 0

    def report(t: float) -> None:
        nonlocal done
        # torchdiffeq calls before each step, rejected ones too
        step = min(round((t - first) / (last - first) * total), total)
        if callback is not None and step > done:
            done = step
            callback(step, total)

    tensor = state if isinstance(state, Tensor) else state[0]
    grid = torch.linspace(first, last, num_steps + 1, dtype=tensor.dtype, device=tensor.device)
    if method == "dopri5":
        options = {}
    else:
        # the steps go into the grid, so that torchdiffeq keeps the last state alone
        options = {"grid_constructor": lambda derivative, state, t: grid}
    solution = odeint(
        _Field(derivative, report),
        state,
        grid[[0, -1]],
        method="heun2" if method == "heun" else method,
        atol=atol,
        rtol=rtol,
        options=options,
    )
    report(last)
    return solution[-1] if isinstance(state, Tensor) else tuple(s[-1] for s in solution)
