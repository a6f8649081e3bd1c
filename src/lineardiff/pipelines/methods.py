"""The samplers of this package by name."""

from typing import Any

from torch import Tensor

from lineardiff.generation.diffusion import GaussianDiffusion
from lineardiff.generation.diffusion_samplers import sample_ancestral, sample_ddim
from lineardiff.generation.flow import Interpolant
from lineardiff.generation.flow_samplers import sample_ode, sample_sde
from lineardiff.generation.noise import Callback, Denoiser, Noise, check_name

METHODS = {
    "diffusion": ("ddpm", "ddim"),
    "flow": ("ode-heun", "ode-euler", "ode-midpoint", "ode-dopri5", "sde-euler", "sde-heun"),
}
"""By objective, the default first."""


def default_steps(method: str) -> int | None:
    """250 for "ddpm" and "sde-...", 50 for the others; None for "ode-dopri5", which chooses its own."""
    if method == "ode-dopri5":
        return None
    return 250 if method.startswith(("ddpm", "sde")) else 50


def sample_by_method(
    process: GaussianDiffusion | Interpolant,
    denoiser: Denoiser,
    x: Tensor,
    *,
    method: str,
    noise: Noise,
    num_steps: int | None = None,
    clip_denoised: bool = False,
    callback: Callback | None = None,
) -> Tensor:
    """Samples of a diffusion or a flow.

    Args:
        process: A diffusion's training chain, of which `num_steps` steps are kept; or a flow's interpolant.
        denoiser, x, noise, callback: As in :func:`sample_sde`; x is (B, C, H, W).
        method: One of :data:`METHODS` for the process. The SDE's diffusion is "sigma" and its last step "mean", as
            in the SiT authors' command.
        num_steps: None takes :func:`default_steps`.
        clip_denoised: Of diffusion: clamp each estimate of the clean image to [-1, 1].

    Returns:
        (B, C, H, W) samples.

    Raises:
        ValueError: A method that the process has not, or a number of steps that it cannot take.
    """
    objective = "flow" if isinstance(process, Interpolant) else "diffusion"
    check_name(f"method of {objective}", method, METHODS[objective])
    num_steps = default_steps(method) if num_steps is None else num_steps
    kind, _, solver = method.partition("-")
    if isinstance(process, Interpolant):
        options: dict[str, Any] = {"method": solver, "num_steps": num_steps, "callback": callback}
        if kind == "ode":
            return sample_ode(process, denoiser, x, **options)
        return sample_sde(process, denoiser, x, noise=noise, diffusion_form="sigma", **options)
    assert num_steps is not None  # dopri5 alone has none
    chain = process.respaced(num_steps)
    options = {"clip_denoised": clip_denoised, "callback": callback}
    if method == "ddim":
        return sample_ddim(chain, denoiser, x, **options)
    return sample_ancestral(chain, denoiser, x, noise=noise, **options)
