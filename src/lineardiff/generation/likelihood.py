"""The log-density that a denoiser's probability-flow ODE gives to data.

Source: Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", arXiv 2011.13456,
section 4.3; the trace by Hutchinson's estimator, Grathwohl et al., "FFJORD", arXiv 1810.01367.
"""

import math

import torch
from torch import Tensor

from lineardiff.generation.flow import Interpolant
from lineardiff.generation.noise import Callback, Denoiser, check_start
from lineardiff.generation.ode import OdeMethod, solve_ode


def log_likelihood(
    interpolant: Interpolant,
    denoiser: Denoiser,
    x: Tensor,
    *,
    probe: torch.Generator | Tensor,
    method: OdeMethod = "dopri5",
    num_steps: int | None = None,
    atol: float = 1e-6,
    rtol: float = 1e-3,
    callback: Callback | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(x) = log N(x_0; 0, 1) - the integral of the velocity's divergence from noise x_0 to data x.

    The divergence is estimated with one vector of random signs for each sample, the same all along the way, so
    that the ODE is an ordinary one: the estimate is unbiased over the signs, and exact where the velocity's
    Jacobian is diagonal. Average over several probes for less variance.

    Args:
        interpolant: The path, and what the denoiser predicts.
        denoiser: Differentiable in x; called with x (B, C, H, W) and t (B,) of x's type.
        x: (B, C, H, W) data, float32 or float64, taken to stand at the last time of the interpolant's interval.
        probe: (B, C, H, W) of -1 and 1, or the generator that draws them.
        method, num_steps, atol, rtol, callback: As in :func:`~lineardiff.generation.ode.solve_ode`; with
            "dopri5" a sample's value depends, within the tolerances, on the others of its batch.

    Returns:
        log p(x) in nats, (B,); and the noise that the ODE takes x to, (B, C, H, W).

    Raises:
        ImportError: torchdiffeq is not installed.
        ValueError: A bad x, probe, method or number of steps.
    """
    check_start(x)
    if isinstance(probe, torch.Generator):
        signs = torch.randint(2, x.shape, generator=probe, device=probe.device).to(x) * 2 - 1
    elif probe.shape == x.shape:
        signs = probe.to(x)
    else:
        raise ValueError(f"probe has shape {tuple(probe.shape)}, x has {tuple(x.shape)}: give equal shapes")

    def derivative(t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            x = state[0].detach().requires_grad_()
            times = t.repeat(len(x))
            velocity = interpolant.velocity(interpolant.evaluate(denoiser, x, times), x, times)
            (product,) = torch.autograd.grad(velocity, x, signs)
        return velocity.detach(), (product * signs).flatten(1).sum(1)

    first, last = interpolant.sample_interval()
    z, change = solve_ode(
        derivative,
        (x, x.new_zeros(len(x))),
        interval=(last, first),
        method=method,
        num_steps=num_steps,
        atol=atol,
        rtol=rtol,
        callback=callback,
    )
    log_prior = -0.5 * (z.square() + math.log(2 * math.pi)).flatten(1).sum(1)
    # integrated from data to noise, the change has the sign of that direction
    return log_prior + change, z
