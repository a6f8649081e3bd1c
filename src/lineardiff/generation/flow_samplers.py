"""Sampling along a stochastic interpolant: the probability-flow ODE, and SDEs with the same marginals.

ODEs are solved by torchdiffeq, which is imported on first use. Source: Ma et al., "SiT", arXiv 2401.08740, equations
2 and 4.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from lineardiff.checks import check_integer, check_number
from lineardiff.extras import missing_extra
from lineardiff.generation.denoisers import Callback, Denoiser, Noise, check_name, check_start, draw
from lineardiff.generation.flow import DiffusionForm, Interpolant

__all__ = ["LastStep", "OdeMethod", "SdeMethod", "sample_ode", "sample_sde", "solve_ode"]

OdeMethod = Literal["euler", "midpoint", "heun", "dopri5"]
SdeMethod = Literal["euler", "heun"]
LastStep = Literal["mean", "euler"] | None
LAST_STEPS: tuple[LastStep, ...] = ("mean", "euler", None)

State = TypeVar("State", Tensor, tuple[Tensor, ...])


def sample_ode(
    interpolant: Interpolant,
    denoiser: Denoiser,
    x: Tensor,
    *,
    method: OdeMethod = "dopri5",
    num_steps: int | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-3,
    reverse: bool = False,
    callback: Callback | None = None,
) -> Tensor:
    """Sample with the probability-flow ODE.

    With "dopri5" a sample depends, within the tolerances, on the rest of its batch. Choose another method where
    results must not depend on the batch.

    Args:
        interpolant: The path, and what the denoiser predicts.
        denoiser: Called with x (B, C, H, W) and t (B,), both of x's dtype.
        x: Noise (B, C, H, W), float32 or float64; data if `reverse` is set.
        method, num_steps, atol, rtol, callback: As in :func:`solve_ode`. The authors' `num_steps` counts grid points,
            one more than the steps counted here.
        reverse: Whether to integrate from data to noise.

    Returns:
        Samples (B, C, H, W) at the last time of the interpolant's interval; noise if `reverse` is set.

    Raises:
        ImportError: torchdiffeq is not installed.
        ValueError: x, the method or the number of steps is invalid, the denoiser's output does not have x's shape, or
            dopri5 finds no step small enough.
    """
    check_start(x)

    def derivative(t: Tensor, x: Tensor) -> Tensor:
        times = t.repeat(len(x))
        return interpolant.velocity(interpolant.evaluate(denoiser, x, times), x, times)

    first, last = interpolant.sample_interval()
    return solve_ode(
        derivative,
        x,
        interval=(last, first) if reverse else (first, last),
        method=method,
        num_steps=num_steps,
        atol=atol,
        rtol=rtol,
        callback=callback,
    )


@torch.no_grad()
def sample_sde(
    interpolant: Interpolant,
    denoiser: Denoiser,
    x: Tensor,
    *,
    noise: Noise,
    method: SdeMethod = "euler",
    diffusion_form: DiffusionForm = "sbdm",
    diffusion_norm: float = 1.0,
    num_steps: int = 250,
    last_step: LastStep = "mean",
    last_step_size: float = 0.04,
    callback: Callback | None = None,
) -> Tensor:
    """Sample with the SDE dx = (velocity + w score) dt + sqrt(2 w) dW, for any w(t) >= 0.

    Args:
        interpolant: The path, and what the denoiser predicts.
        denoiser: Called with x (B, C, H, W) and t (B,), both of x's dtype; once per step, twice with "heun".
        x: Initial noise (B, C, H, W), float32 or float64.
        noise: Source of the noise of each step: a generator, or a function from the step 0, 1, ... to (B, C, H, W).
        method: "euler" (Euler-Maruyama) or "heun" (noise first, then a Heun step of the drift).
        diffusion_form, diffusion_norm: w, as in :meth:`Interpolant.diffusion`.
        num_steps: Number of steps including the last one.
        last_step: Noise-free step from 1 - last_step_size to 1: along the drift ("mean") or the ODE ("euler"). None
            ends with an ordinary step.
        last_step_size: Length of the last step, in (0, 1); unused if `last_step` is None.
        callback: Called with (step, num_steps) after each step.

    Returns:
        Samples (B, C, H, W).

    Raises:
        ValueError: An argument is invalid, "sbdm" is used on a path where it is infinite at t = 0 while `sample_eps`
            is 0, or "heun" is used without a last step while `sample_eps` is 0.
    """
    check_start(x)
    check_name("SDE method", method, get_args(SdeMethod))
    check_name("diffusion form", diffusion_form, get_args(DiffusionForm))
    check_name("last step", last_step, LAST_STEPS)
    if last_step is not None and not 0 < last_step_size < 1:
        raise ValueError(f"last_step_size={last_step_size}; expected a length in (0, 1).")
    check_integer("num_steps", num_steps, minimum=1 if last_step is None else 2)
    inner_steps = num_steps if last_step is None else num_steps - 1
    first, last = interpolant.sample_interval(
        diffusion_form=diffusion_form, last_step_size=0.0 if last_step is None else last_step_size
    )
    if diffusion_form == "sbdm" and interpolant.path != "vp" and first == 0:
        raise ValueError(
            f"diffusion_form 'sbdm' is infinite at t = 0 on path {interpolant.path!r}; set the interpolant's "
            "sample_eps above 0, or to None."
        )
    if method == "heun" and last == 1:
        raise ValueError(
            "method 'heun' without a last step needs the score at t = 1, where it is undefined; set the interpolant's "
            "sample_eps above 0, or to None, or choose a last_step."
        )
    if first >= last:
        raise ValueError(f"the SDE would run from t = {first} to {last}; choose a smaller last_step_size.")

    def evaluate(x: Tensor, time: float) -> tuple[Tensor, Tensor]:
        t = torch.full((len(x),), time, dtype=x.dtype, device=x.device)
        output = interpolant.evaluate(denoiser, x, t)
        return interpolant.velocity(output, x, t), interpolant.score(output, x, t)

    def diffusion(time: float) -> float:
        t = torch.tensor(time, dtype=torch.float64)
        return float(interpolant.diffusion(t, diffusion_form, norm=diffusion_norm))

    def drift(x: Tensor, time: float) -> Tensor:
        velocity, score = evaluate(x, time)
        return velocity + diffusion(time) * score

    dt = (last - first) / inner_steps
    for step in range(inner_steps):
        time = first + step * dt
        kick = math.sqrt(2 * diffusion(time) * dt) * draw(noise, step, x)
        if method == "euler":
            x = x + dt * drift(x, time) + kick
        else:
            x = x + kick
            slope = drift(x, time)
            x = x + dt / 2 * (slope + drift(x + dt * slope, time + dt))
        if callback is not None:
            callback(step + 1, num_steps)

    if last_step is not None:
        x = x + last_step_size * (drift(x, last) if last_step == "mean" else evaluate(x, last)[0])
        if callback is not None:
            callback(num_steps, num_steps)
    return x


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
    """Integrate an ordinary differential equation and return the final state.

    dopri5 accepts a step by the error over the entire state, so its steps and, within the tolerances, its results
    depend on the samples integrated together. Its last step runs past the end and the state is interpolated, so the
    derivative must be finite there. The other methods treat each sample independently.

    Args:
        derivative: Function of (t, state) with scalar t; returns the same structure as the state.
        state: A tensor or a tuple of tensors, at the first time of the interval.
        interval: (first, last) time, in either order.
        method: "euler" (one evaluation per step), "midpoint" or "heun" (two; the trapezoidal rule), with equal steps;
            or "dopri5", with steps chosen by the tolerances.
        num_steps: Number of equal steps, by default 50. Must be None for dopri5.
        atol, rtol: Tolerances of dopri5.
        callback: Called with (step, total) after each step. dopri5 does not know its steps in advance and reports the
            percentage of the interval, with a total of 100.

    Returns:
        The state at the last time.

    Raises:
        ImportError: torchdiffeq is not installed.
        ValueError: The method is unknown, `num_steps` is below 1 or given to dopri5, or dopri5 finds no step small
            enough, as happens when the derivative is not finite.
    """
    try:
        from torchdiffeq import odeint
    except ImportError as error:
        raise missing_extra("generate", package="torchdiffeq") from error
    check_name("ODE method", method, get_args(OdeMethod))
    if method == "dopri5" and num_steps is not None:
        raise ValueError(f"num_steps={num_steps}, but dopri5 is adaptive; set atol and rtol instead.")
    num_steps = 50 if num_steps is None else num_steps
    check_integer("num_steps", num_steps)
    check_number("atol", atol)
    check_number("rtol", rtol)
    first, last = interval
    total = 100 if method == "dopri5" else num_steps
    done = 0

    def report(t: float) -> None:
        nonlocal done
        # torchdiffeq calls before each step, rejected steps included
        step = min(round((t - first) / (last - first) * total), total)
        if callback is not None and step > done:
            done = step
            callback(step, total)

    tensor = state if isinstance(state, Tensor) else state[0]
    grid = torch.linspace(first, last, num_steps + 1, dtype=tensor.dtype, device=tensor.device)
    # given as a constructor, the grid sets the steps while torchdiffeq keeps only the last state
    options = {} if method == "dopri5" else {"grid_constructor": lambda derivative, state, t: grid}
    try:
        solution = odeint(
            _Field(derivative, report),
            state,
            grid[[0, -1]],
            method="heun2" if method == "heun" else method,
            atol=atol,
            rtol=rtol,
            options=options,
        )
    except AssertionError as error:
        if not str(error).startswith(("underflow in dt", "non-finite values")):
            raise
        raise ValueError(
            "dopri5 found no step that meets its tolerances: the network's output is not finite or changes too fast, "
            "so the network has probably diverged."
        ) from error
    report(last)
    return solution[-1] if isinstance(state, Tensor) else tuple(s[-1] for s in solution)


class _Field:
    """The right-hand side; torchdiffeq looks for its callback on this object."""

    def __init__(self, derivative: Callable[..., Any], report: Callable[[float], None]) -> None:
        self.derivative = derivative
        self.report = report

    def __call__(self, t: Tensor, state: Any) -> Any:
        return self.derivative(t, state)

    def callback_step(self, t: Tensor, state: Any, dt: Tensor) -> None:
        self.report(float(t))
