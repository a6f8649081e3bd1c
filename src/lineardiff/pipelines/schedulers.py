"""Sampling by diffusers' schedulers, on the denoisers of this package."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lineardiff.generation.diffusion import GaussianDiffusion
from lineardiff.generation.noise import Denoiser

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
"""The schedulers that were compared with exact solutions: of diffusion, and of flow."""

StepEnd = Callable[[int, Tensor, Tensor], Tensor]
"""``step_end(step, timestep, x)`` after step 0, 1, ...; what it returns takes the place of x."""


def is_flow_scheduler(scheduler: Any) -> bool:
    """Whether it is one of the FlowMatch schedulers, which alone go along straight lines from noise to data."""
    return hasattr(scheduler, "scale_noise")


def check_scheduler(scheduler: Any, *, flow: bool, clips: bool, learned_variance: bool) -> None:
    """Refuse a scheduler that goes along another chain than the network was trained on.

    Args:
        scheduler: Of diffusers.
        flow: Whether the network was trained on the linear path, to predict the velocity; otherwise it predicts
            the noise of :class:`GaussianDiffusion`.
        clips: Whether clean samples are in [-1, 1] (pixels), so that clipping is right.
        learned_variance: Whether the denoiser's answer has 2C channels.

    Raises:
        ValueError: It does not fit; the message says which option.
    """
    name, config = type(scheduler).__name__, scheduler.config
    if flow != is_flow_scheduler(scheduler) or name not in CHECKED[flow]:
        raise ValueError(
            f"{name} does not sample {'flow' if flow else 'diffusion'} models here; give one of "
            f"{', '.join(CHECKED[flow])}"
        )
    refused = ["invert_sigmas", "use_dynamic_shifting"] if flow else ["use_flow_sigmas"]
    for option in refused:
        if config.get(option):
            raise ValueError(f"{name} has {option}=True, which changes the chain: give it {option}=False")
    if flow:
        return
    ours = GaussianDiffusion().alphas_cumprod
    theirs = getattr(scheduler, "alphas_cumprod", None)
    if theirs is None or theirs.shape != ours.shape or not torch.allclose(theirs.double(), ours, rtol=1e-3):
        raise ValueError(
            f"{name} has another noise schedule than the model was trained on: give it num_train_timesteps=1000, "
            'beta_start=1e-4, beta_end=0.02, beta_schedule="linear"'
        )
    if config.get("prediction_type", "epsilon") != "epsilon":
        raise ValueError(
            f"{name} has prediction_type={config.prediction_type!r}: the model predicts 'epsilon'"
        )
    for option in ("clip_sample", "thresholding"):
        if config.get(option) and not clips:
            raise ValueError(
                f"{name} has {option}=True, which cuts latents off at -1 and 1: give it {option}=False"
            )
    if _takes_variance(scheduler) and not (_is_ddpm(scheduler) and learned_variance):
        raise ValueError(
            f"{name} has variance_type={config.variance_type!r}, which needs a model with a learned variance and "
            "DDPMScheduler; give another variance_type"
        )


@torch.no_grad()
def sample_by_scheduler(
    scheduler: Any,
    denoiser: Denoiser,
    x: Tensor,
    *,
    num_steps: int,
    generator: torch.Generator | list[torch.Generator] | None = None,
    step_end: StepEnd | None = None,
) -> Tensor:
    """Samples by a scheduler of diffusers, which :func:`check_scheduler` accepts.

    Args:
        scheduler: Changed by :meth:`set_timesteps`. A flow scheduler counts its time from data (0) to noise
            (its num_train_timesteps); the denoiser is asked at t = 1 - that share, and its velocity turned round.
        denoiser: Called with x (B, C, H, W) and t (B,), in the times of this package. The channels of a learned
            variance go to a DDPMScheduler whose variance_type asks for them, and are dropped otherwise.
        x: (B, C, H, W) standard normal noise.
        num_steps: As :meth:`set_timesteps` takes it.
        generator: Of the steps' noise, where the scheduler takes any; a list has one for each sample.
        step_end: Called after each step.

    Returns:
        (B, C, H, W) samples.
    """
    scheduler.set_timesteps(num_steps, device=x.device)
    flow, channels = is_flow_scheduler(scheduler), x.shape[1]
    takes = inspect.signature(scheduler.step).parameters
    options = {"generator": generator} if "generator" in takes else {}
    if not flow:
        x = x * scheduler.init_noise_sigma
    for step, timestep in enumerate(scheduler.timesteps):
        if flow:
            t = 1 - timestep / scheduler.config.num_train_timesteps
            answer = -denoiser(x, t.to(x.dtype).expand(len(x)))[:, :channels]
        else:
            answer = denoiser(scheduler.scale_model_input(x, timestep), timestep.expand(len(x)))
            answer = answer if _takes_variance(scheduler) else answer[:, :channels]
        x = scheduler.step(answer, timestep, x, **options).prev_sample
        if step_end is not None:
            x = step_end(step, timestep, x)
    return x


def _is_ddpm(scheduler: Any) -> bool:
    from diffusers import DDPMScheduler

    return isinstance(scheduler, DDPMScheduler)


def _takes_variance(scheduler: Any) -> bool:
    return scheduler.config.get("variance_type") in ("learned", "learned_range")
