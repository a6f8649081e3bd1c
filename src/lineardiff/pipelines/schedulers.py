"""Sampling with diffusers' schedulers, on the denoisers of this package."""

import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lineardiff.extras import missing_extra
from lineardiff.generation.denoisers import Denoiser, check_name, check_start
from lineardiff.generation.diffusion import GaussianDiffusion

__all__ = ["check_scheduler", "is_flow_scheduler", "sample_by_scheduler", "sample_diffusion"]

DIFFUSION_METHODS = ("ddpm", "ddim", "ddim-inverse")

CHECKED = {
    False: (
        "DDPMScheduler",
        "DDIMScheduler",
        "DPMSolverMultistepScheduler",
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "HeunDiscreteScheduler",
    ),
    True: ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"),
}
"""Schedulers that were compared with exact solutions, by whether they sample flow."""

StepEnd = Callable[[int, Tensor, Tensor], Tensor]
"""``step_end(step, timestep, x)`` is called after step 0, 1, ...; its result replaces x."""


def is_flow_scheduler(scheduler: Any) -> bool:
    """Return whether a scheduler is one of diffusers' FlowMatch schedulers."""
    return hasattr(scheduler, "scale_noise")


def check_scheduler(scheduler: Any, *, flow: bool, clips: bool, learned_variance: bool) -> None:
    """Check that a scheduler follows the process that the network was trained on.

    Args:
        scheduler: A scheduler of diffusers.
        flow: Whether the network predicts the velocity of the linear path; otherwise the noise of
            :class:`GaussianDiffusion`.
        clips: Whether clean samples lie in [-1, 1] (pixels), so that clipping them is correct.
        learned_variance: Whether the denoiser's output has 2C channels.

    Raises:
        ValueError: It follows another process; the message names the option.
    """
    name, config = type(scheduler).__name__, scheduler.config
    if flow != is_flow_scheduler(scheduler) or name not in CHECKED[flow]:
        raise ValueError(
            f"{name} does not sample {'flow' if flow else 'diffusion'} models correctly; use one of "
            f"{', '.join(CHECKED[flow])}."
        )
    for option in ["invert_sigmas", "use_dynamic_shifting"] if flow else ["use_flow_sigmas"]:
        if config.get(option):
            raise ValueError(f"{name} has {option}=True, which changes the process; set {option}=False.")
    if flow:
        return
    ours = GaussianDiffusion().alphas_cumprod
    theirs = getattr(scheduler, "alphas_cumprod", None)
    if theirs is None or theirs.shape != ours.shape or not torch.allclose(theirs.double(), ours, rtol=1e-3):
        raise ValueError(
            f"{name} has another noise schedule than the model was trained with; set num_train_timesteps=1000, "
            'beta_start=1e-4, beta_end=0.02, beta_schedule="linear".'
        )
    if config.get("prediction_type", "epsilon") != "epsilon":
        raise ValueError(
            f"{name} has prediction_type={config.prediction_type!r}, but the model predicts 'epsilon'."
        )
    for option in ("clip_sample", "thresholding"):
        if config.get(option) and not clips:
            raise ValueError(
                f"{name} has {option}=True, which would cut latents off at -1 and 1; set {option}=False."
            )
    if _takes_variance(scheduler) and not (name == "DDPMScheduler" and learned_variance):
        raise ValueError(
            f"{name} has variance_type={config.variance_type!r}, which needs DDPMScheduler and a model with a learned "
            "variance; choose another variance_type."
        )


def sample_diffusion(
    diffusion: GaussianDiffusion,
    denoiser: Denoiser,
    x: Tensor,
    *,
    method: str = "ddpm",
    num_steps: int = 250,
    eta: float = 0.0,
    clip_denoised: bool = False,
    generator: torch.Generator | list[torch.Generator] | None = None,
    step_end: StepEnd | None = None,
) -> Tensor:
    """Sample a diffusion with diffusers' DDPMScheduler or DDIMScheduler, or invert it with DDIMInverseScheduler.

    The steps are those of the DiT authors' code, ``diffusion.respaced(num_steps)``. No timestep_spacing of diffusers'
    schedulers gives them to DDIM, which takes the previous timestep to be 1000 // num_steps earlier. The scheduler
    therefore runs over the respaced chain as if it were a training chain with its betas, and the denoiser receives
    the timesteps of the real one.

    Sources: Ho et al., arXiv 2006.11239, algorithm 2; Song et al., "Denoising Diffusion Implicit Models", arXiv
    2010.02502, equation 12.

    Args:
        diffusion: The training chain and the variance of the reverse step.
        denoiser: Called once per step with x (B, C, H, W) and the training timestep (B,) int64.
        x: Standard normal noise (B, C, H, W), float32 or float64; images or latents for "ddim-inverse".
        method: "ddpm" (ancestral sampling), "ddim" or "ddim-inverse" (from images to the noise from which DDIM returns
            near them, the nearer the more steps).
        num_steps: Number of steps, from 2 to the length of the training chain.
        eta: Noise of DDIM's steps, from 0 (none) to 1 (that of ancestral sampling with the posterior's variance).
        clip_denoised: Whether to clamp each estimate of the clean image to [-1, 1]. For pixels, not for latents.
        generator: Generator of the steps' noise; a list has one per sample.
        step_end: Called after each step.

    Returns:
        Samples (B, C, H, W); noise for "ddim-inverse".

    Raises:
        ImportError: diffusers is not installed.
        ValueError: An argument is invalid.
    """
    try:
        from diffusers import DDIMInverseScheduler, DDIMScheduler, DDPMScheduler
    except ImportError as error:
        raise missing_extra("generate", package="diffusers") from error
    check_name("method of diffusion", method, DIFFUSION_METHODS)
    check_start(x)
    number = isinstance(eta, Real) and not isinstance(eta, bool)
    if not number or not 0 <= eta <= 1 or (eta > 0 and method != "ddim"):
        raise ValueError(f"eta={eta!r}; expected a number from 0 to 1 for 'ddim', and 0 for other methods.")
    chain = diffusion.respaced(num_steps)
    options = {
        "num_train_timesteps": len(chain),
        "trained_betas": chain.betas.tolist(),
        "clip_sample": clip_denoised,
    }
    times = chain.timesteps
    step_options: dict[str, Any] = {}
    scheduler: Any
    if method == "ddpm":
        scheduler = DDPMScheduler(**options, variance_type=chain.variance)
    elif method == "ddim":
        scheduler = DDIMScheduler(**options)
        step_options = {"eta": eta, "use_clipped_model_output": clip_denoised}
    else:
        scheduler = DDIMInverseScheduler(**options)
        # the samples stand one step before the one that the scheduler names
        times = torch.cat([times[:1], times[:-1]])
    # float64: from float32 betas the variances of the first steps keep three digits
    scheduler.alphas_cumprod = chain.alphas_cumprod
    return sample_by_scheduler(
        scheduler,
        denoiser,
        x,
        num_steps=len(chain),
        times=times,
        generator=generator,
        step_options=step_options,
        step_end=step_end,
    )


@torch.no_grad()
def sample_by_scheduler(
    scheduler: Any,
    denoiser: Denoiser,
    x: Tensor,
    *,
    num_steps: int,
    times: Tensor | None = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    step_options: dict[str, Any] | None = None,
    step_end: StepEnd | None = None,
) -> Tensor:
    """Sample with a scheduler of diffusers accepted by :func:`check_scheduler`.

    Args:
        scheduler: Modified by its `set_timesteps`. A flow scheduler counts time from data (0) to noise (its
            num_train_timesteps); the denoiser is called at t = 1 - that fraction, and its velocity is negated.
        denoiser: Called with x (B, C, H, W) and t (B,), in this package's times. The channels of a learned variance
            are passed to a DDPMScheduler whose variance_type needs them, and dropped otherwise.
        x: Standard normal noise (B, C, H, W).
        num_steps: As `scheduler.set_timesteps` takes it.
        times: Training timesteps (T,) by timestep of the scheduler, where these differ.
        generator: Generator of the steps' noise, if the scheduler takes one; a list has one per sample.
        step_options: Further arguments of `scheduler.step`.
        step_end: Called after each step.

    Returns:
        Samples (B, C, H, W).

    Raises:
        ValueError: The denoiser's output has too few channels.
    """
    scheduler.set_timesteps(num_steps, device=x.device)
    flow, channels = is_flow_scheduler(scheduler), x.shape[1]
    needed = 2 * channels if _takes_variance(scheduler) else channels
    options = dict(step_options or {})
    if "generator" in inspect.signature(scheduler.step).parameters:
        options["generator"] = generator
    times = None if times is None else times.to(x.device)
    if not flow:
        x = x * scheduler.init_noise_sigma
    for step, timestep in enumerate(scheduler.timesteps):
        if flow:
            time, given = 1 - (timestep / scheduler.config.num_train_timesteps).to(x.dtype), x
        else:
            time = timestep if times is None else times[timestep]
            given = scheduler.scale_model_input(x, timestep)
        output = denoiser(given, time.expand(len(x)))
        if output.shape[1] < needed:
            raise ValueError(
                f"the denoiser returned {output.shape[1]} channels for x of {channels}; {type(scheduler).__name__} "
                f"needs {needed}."
            )
        output = output[:, :needed]
        x = scheduler.step(-output if flow else output, timestep, x, **options).prev_sample
        if step_end is not None:
            x = step_end(step, timestep if flow else time, x)
    return x


def _takes_variance(scheduler: Any) -> bool:
    return scheduler.config.get("variance_type") in ("learned", "learned_range")
