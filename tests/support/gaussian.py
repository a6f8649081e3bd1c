"""Data of independent elements N(MEAN, STD^2): every marginal, score and velocity is known in closed form."""

from collections.abc import Callable

import torch
from torch import Tensor

MEAN, STD = 0.7, 0.4


def levels(path: str, t: Tensor) -> tuple[Tensor, Tensor]:
    """alpha and sigma, written apart from the package."""
    if path == "linear":
        return t, 1 - t
    if path == "gvp":
        return torch.sin(torch.pi * t / 2), torch.cos(torch.pi * t / 2)
    # beta falls linearly from 20 at noise to 0.1 at data; its integral from t to 1 is that of a trapezoid
    beta = 20 - 19.9 * t
    alpha = torch.exp(-0.5 * (1 - t) * (beta + 0.1) / 2)
    return alpha, torch.sqrt((1 - alpha**2).abs())  # abs: dopri5 tries times past 1


def rates(path: str, t: Tensor) -> tuple[Tensor, Tensor]:
    """The derivatives of alpha and sigma, by automatic differentiation."""
    return torch.func.jvp(lambda t: levels(path, t), (t,), (torch.ones_like(t),))[1]


def marginal(path: str, t: float) -> tuple[float, float]:
    """Mean and variance of x_t."""
    alpha, sigma = (float(level) for level in levels(path, torch.tensor(t, dtype=torch.float64)))
    return alpha * MEAN, (alpha * STD) ** 2 + sigma**2


def expectations(path: str, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """The expected data and noise, given x_t."""
    alpha, sigma = levels(path, t.reshape(-1, 1, 1, 1))
    residual = (x - alpha * MEAN) / ((alpha * STD) ** 2 + sigma**2)
    return MEAN + alpha * STD**2 * residual, sigma * residual


def optimal(path: str, prediction: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The denoiser that a network would become."""

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        data, noise = expectations(path, x, t)
        if prediction == "noise":
            return noise
        alpha, sigma = levels(path, t.reshape(-1, 1, 1, 1))
        if prediction == "score":
            return -(x - alpha * MEAN) / ((alpha * STD) ** 2 + sigma**2)
        d_alpha, d_sigma = rates(path, t.reshape(-1, 1, 1, 1))
        return d_alpha * data + d_sigma * noise

    return denoise


def moments(
    sample: Callable[..., Tensor], num_noises: int, *, mean: float = 0.0, variance: float = 1.0
) -> tuple[float, float]:
    """Exact mean and variance of what a sampler that is affine in its noises yields: no random number is drawn.

    Args:
        sample: Of (x, noise=function of the step), elementwise affine in both.
        num_noises: How many steps take noise.
        mean, variance: Of the sampler's start.
    """
    units = torch.eye(num_noises + 2, dtype=torch.float64)[..., None, None, None]
    out = sample(mean + variance**0.5 * units[1], noise=lambda step: units[step + 2]).flatten()
    return float(out[0]), float((out[1:] - out[0]).square().sum())
