"""From noise to data along a stochastic interpolant: the probability-flow ODE, and SDEs with the same marginals.

Source: Ma et al., "SiT", arXiv 2401.08740, equations 2 and 4.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lineardiff.generation.flow import DiffusionForm, Interpolant
from lineardiff.generation.noise import Callback, Denoiser, Noise, check_name, check_start, draw
from lineardiff.generation.ode import OdeMethod, solve_ode

SdeMethod = Literal["euler", "heun"]
LastStep = Literal["mean", "tweedie", "euler"] | None
LAST_STEPS: tuple[LastStep, ...] = ("mean", "tweedie", "euler", None)


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
    """Samples by the probability-flow ODE.

    Args:
        interpolant: The path, and what the denoiser predicts.
        denoiser: Called with x (B, C, H, W) and t (B,) of x's type.
        x: (B, C, H, W) noise, float32 or float64; with `reverse` data.
        method, num_steps, atol, rtol, callback: As in :func:`~lineardiff.generation.ode.solve_ode`. The authors'
            `num_steps` counts the points of the grid, which are one more than the steps counted here.
        reverse: From data to noise.

    With "dopri5" a sample depends, within the tolerances, on the others of its batch: where results must not
    depend on the batch, choose another method.

    Returns:
        (B, C, H, W) samples, at the last time of the interpolant's interval; with `reverse` noise.

    Raises:
        ImportError: torchdiffeq is not installed.
        ValueError: A bad x, method or number of steps, or a denoiser whose answer is not of x's shape.
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
    """Samples by dx = (velocity + w score) dt + sqrt(2 w) dW, for any w(t) >= 0.

    Args:
        interpolant: The path, and what the denoiser predicts.
        denoiser: Called with x (B, C, H, W) and t (B,) of x's type; once a step, twice in a step of "heun".
        x: (B, C, H, W) initial noise, float32 or float64.
        noise: Of the steps: a generator, or a function from the step 0, 1, ... to (B, C, H, W).
        method: "euler" (Euler-Maruyama) or "heun" (the noise first, then Heun's step of the drift).
        diffusion_form, diffusion_norm: w, as in :meth:`Interpolant.diffusion`.
        num_steps: All steps, the last one included.
        last_step: What is done at 1 - last_step_size, without noise: a step of the drift ("mean") or of the
            ODE ("euler"), or the expected data ("tweedie"); None ends with a usual step.
        last_step_size: Length of the last step, in (0, 1); unused when `last_step` is None.
        callback: Called with (step, num_steps) after each step.

    Returns:
        (B, C, H, W) samples.

    Raises:
        ValueError: A bad x, name, norm, size or number of steps; "sbdm" on a path where it is infinite at t = 0
            while `sample_eps` is 0; "heun" without a last step while `sample_eps` is 0.
    """
    check_start(x)
    check_name("SDE method", method, get_args(SdeMethod))
    check_name("diffusion form", diffusion_form, get_args(DiffusionForm))
    check_name("last step", last_step, LAST_STEPS)
    if diffusion_norm < 0:
        raise ValueError(f"diffusion_norm={diffusion_norm}: a diffusion is not negative; expected at least 0")
    if last_step is not None and not 0 < last_step_size < 1:
        raise ValueError(f"last_step_size={last_step_size}: expected a length in (0, 1)")
    usual_steps = num_steps if last_step is None else num_steps - 1
    if usual_steps < 1:
        raise ValueError(
            f"num_steps={num_steps}: expected at least 1 step besides the last one, {last_step!r}"
        )
    first, last = interpolant.sample_interval(
        diffusion_form=diffusion_form, last_step_size=0.0 if last_step is None else last_step_size
    )
    if diffusion_form == "sbdm" and interpolant.path != "vp" and first == 0:
        raise ValueError(
            f"diffusion_form 'sbdm' is infinite at t = 0 on path {interpolant.path!r}: give the interpolant "
            "sample_eps above 0, or None"
        )
    if method == "heun" and last == 1:
        raise ValueError(
            "method 'heun' without a last step needs the score at t = 1, where it is not defined: give the "
            "interpolant sample_eps above 0, or None, or choose a last_step"
        )
    if first >= last:
        raise ValueError(f"the SDE would run from t = {first} to {last}: choose a smaller last_step_size")

    def evaluate(x: Tensor, time: float) -> tuple[Tensor, Tensor]:
        t = torch.full((len(x),), time, dtype=x.dtype, device=x.device)
        output = interpolant.evaluate(denoiser, x, t)
        return interpolant.velocity(output, x, t), interpolant.score(output, x, t)

    def diffusion(time: float) -> float:
        return float(
            interpolant.diffusion(
                torch.tensor(time, dtype=torch.float64), diffusion_form, norm=diffusion_norm
            )
        )

    def drift(x: Tensor, time: float) -> Tensor:
        velocity, score = evaluate(x, time)
        return velocity + diffusion(time) * score

    dt = (last - first) / usual_steps
    for step in range(usual_steps):
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

    if last_step == "mean":
        x = x + last_step_size * drift(x, last)
    elif last_step == "euler":
        x = x + last_step_size * evaluate(x, last)[0]
    elif last_step == "tweedie":
        p = interpolant.at(torch.tensor(last, dtype=torch.float64))
        x = (x + float(p.sigma) ** 2 * evaluate(x, last)[1]) / float(p.alpha)
    if last_step is not None and callback is not None:
        callback(num_steps, num_steps)
    return x
