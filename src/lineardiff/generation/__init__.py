"""Diffusion and flow: losses, paths, samplers and likelihood. Independent of any network.

A *denoiser* is a function of x (B, C, H, W) and t (B,); the caller binds the network's other arguments. As in the code
of DiT and SiT, diffusion counts time from images (t = 0) to noise (t = 999), and flow from noise (t = 0) to images
(t = 1). Diffusion models are sampled by diffusers' schedulers, see :mod:`lineardiff.pipelines`.
"""

from lineardiff.generation.denoisers import Callback, Denoiser, Noise, guided
from lineardiff.generation.diffusion import Denoised, GaussianDiffusion, Posterior, Variance
from lineardiff.generation.flow import DiffusionForm, Interpolant, Prediction, Weighting
from lineardiff.generation.flow_samplers import (
    LastStep,
    OdeMethod,
    SdeMethod,
    sample_ode,
    sample_sde,
    solve_ode,
)
from lineardiff.generation.likelihood import log_likelihood
from lineardiff.generation.paths import FlowPath, PathCoefficients

__all__ = [
    "Callback",
    "Denoised",
    "Denoiser",
    "DiffusionForm",
    "FlowPath",
    "GaussianDiffusion",
    "Interpolant",
    "LastStep",
    "Noise",
    "OdeMethod",
    "PathCoefficients",
    "Posterior",
    "Prediction",
    "SdeMethod",
    "Variance",
    "Weighting",
    "guided",
    "log_likelihood",
    "sample_ode",
    "sample_sde",
    "solve_ode",
]
