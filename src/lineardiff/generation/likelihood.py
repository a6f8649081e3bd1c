"""Log-likelihood of data under the probability-flow ODE of a denoiser.

Sources: Song et al., "Score-Based Generative Modeling through Stochastic Differential Equations", arXiv 2011.13456,
section 4.3; trace estimator: Grathwohl et al., "FFJORD", arXiv 1810.01367.
"""

import math

import torch
from torch import Tensor

from lineardiff.generation.denoisers import Callback, Denoiser, check_start
from lineardiff.generation.flow import Interpolant
from lineardiff.generation.flow_samplers import OdeMethod, solve_ode

__all__ = ["log_likelihood"]


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
    """Return log p(x) = log N(x_0; 0, 1) - integral of div(velocity) dt, from noise x_0 to data x.

    The divergence is estimated by Hutchinson's estimator with one vector of random signs per sample, fixed for the
    integration. The estimate is unbiased over the signs and exact where the velocity's Jacobian is diagonal. Average
    over several probes to reduce its variance.

    Args:
        interpolant: The path, and what the denoiser predicts.
        denoiser: Differentiable in x; called with x (B, C, H, W) and t (B,), both of x's dtype.
        x: Data (B, C, H, W), float32 or float64, taken to be at the last time of the interpolant's interval.
        probe: Signs -1 and 1 of shape (B, C, H, W), or a generator to draw them from.
        method, num_steps, atol, rtol, callback: As in :func:`solve_ode`. With "dopri5" the value of a sample depends,
            within the tolerances, on the rest of its batch.

    Returns:
        log p(x) in nats, (B,), and the noise to which the ODE takes x, (B, C, H, W).

    Raises:
        ImportError: torchdiffeq is not installed.
        ValueError: x, the probe, the method or the number of steps is invalid.
    """
    check_start(x)
    if isinstance(probe, torch.Generator):
        signs = torch.randint(2, x.shape, generator=probe, device=probe.device).to(x) * 2 - 1
    elif probe.shape == x.shape:
        signs = probe.to(x)
    else:
        raise ValueError(
            f"probe has shape {tuple(probe.shape)} but x has {tuple(x.shape)}; pass equal shapes."
        )

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
    # the integral runs from data to noise, which flips its sign
    return log_prior + change, z
