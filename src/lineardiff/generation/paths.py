"""Paths of stochastic interpolants: x_t = alpha(t) x_1 + sigma(t) x_0, from noise x_0 (t = 0) to data x_1 (t = 1).

Source: Ma et al., "SiT: Exploring Flow and Diffusion-based Generative Models with Scalable Interpolant
Transformers", arXiv 2401.08740, section 2 and appendix A.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

__all__ = ["PATHS", "FlowPath", "PathCoefficients"]

FlowPath = Literal["linear", "gvp", "vp"]

BETA_MIN, BETA_MAX = 0.1, 20.0  # variance-preserving path, at data and at noise


class PathCoefficients(NamedTuple):
    """Coefficients of a path at times t; every field has the shape of t."""

    alpha: Tensor
    sigma: Tensor
    d_alpha: Tensor
    d_sigma: Tensor
    """Infinite at t = 1 on the variance-preserving path."""
    d_log_alpha: Tensor
    """d_alpha / alpha; infinite at t = 0 on the linear and GVP paths."""
    score_weight: Tensor
    """w = sigma^2 d_log_alpha - sigma d_sigma, as in velocity = d_log_alpha x + w score; infinite with d_log_alpha."""


def _linear(t: Tensor) -> PathCoefficients:
    one = torch.ones_like(t)
    return PathCoefficients(t, 1 - t, one, -one, 1 / t, (1 - t) / t)


def _gvp(t: Tensor) -> PathCoefficients:
    half_pi = math.pi / 2
    # near the data, sin(1 - t) is exact to rounding and cos(t) is not
    alpha, sigma = torch.sin(half_pi * t), torch.sin(half_pi * (1 - t))
    d_log_alpha = half_pi * sigma / alpha
    return PathCoefficients(alpha, sigma, half_pi * sigma, -half_pi * alpha, d_log_alpha, d_log_alpha)


def _vp(t: Tensor) -> PathCoefficients:
    to_data = 1 - t
    log_alpha = -0.25 * to_data.square() * (BETA_MAX - BETA_MIN) - 0.5 * to_data * BETA_MIN
    d_log_alpha = 0.5 * (to_data * (BETA_MAX - BETA_MIN) + BETA_MIN)
    alpha = log_alpha.exp()
    # abs: dopri5 evaluates past t = 1, where alpha exceeds 1 until t = 1.01; a NaN would abort the solver
    sigma = torch.expm1(2 * log_alpha).abs().sqrt()
    d_sigma = -alpha.square() * d_log_alpha / sigma
    return PathCoefficients(alpha, sigma, alpha * d_log_alpha, d_sigma, d_log_alpha, d_log_alpha)


PATHS: dict[str, Callable[[Tensor], PathCoefficients]] = {"linear": _linear, "gvp": _gvp, "vp": _vp}
"""Functions from times (any shape, floating point) to :class:`PathCoefficients`, by name."""
