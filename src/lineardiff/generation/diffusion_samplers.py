"""From noise to images through a Gaussian diffusion: ancestral and DDIM sampling, and DDIM from images to noise.

Sources: Ho et al., arXiv 2006.11239, algorithm 2; Song et al., "Denoising Diffusion Implicit Models", arXiv
2010.02502, equation 12.
"""

import math

import torch
from torch import Tensor

from lineardiff.generation.diffusion import GaussianDiffusion
from lineardiff.generation.noise import Callback, Denoiser, Noise, check_start, draw


def _steps(x: Tensor, index: int) -> Tensor:
    return torch.full((len(x),), index, dtype=torch.int64, device=x.device)


@torch.no_grad()
def sample_ancestral(
    diffusion: GaussianDiffusion,
    denoiser: Denoiser,
    x: Tensor,
    *,
    noise: Noise,
    clip_denoised: bool = False,
    callback: Callback | None = None,
) -> Tensor:
    """Samples by the learned reverse of the chain (DDPM).

    Args:
        diffusion: The chain, such as ``GaussianDiffusion().respaced(250)``.
        denoiser: Called once a step with x (B, C, H, W) and the training step (B,) int64.
        x: (B, C, H, W) initial noise, float32 or float64.
        noise: Of the steps: a generator, or a function from the number of the step (0 is the noisiest) to
            (B, C, H, W). The last step takes none.
        clip_denoised: Clamp each estimate of the clean image to [-1, 1]; for pixels, not for latents.
        callback: Called with (step, total) after each step.

    Returns:
        (B, C, H, W) samples.

    Raises:
        ValueError: A bad x, or a denoiser's answer of a bad shape.
    """
    check_start(x)
    total = len(diffusion)
    for step in range(total):
        index = total - 1 - step
        reverse = diffusion.p_mean_variance(denoiser, x, _steps(x, index), clip_denoised=clip_denoised)
        x = reverse.mean
        if index > 0:
            x = x + torch.exp(0.5 * reverse.log_variance) * draw(noise, step, x)
        if callback is not None:
            callback(step + 1, total)
    return x


@torch.no_grad()
def sample_ddim(
    diffusion: GaussianDiffusion,
    denoiser: Denoiser,
    x: Tensor,
    *,
    eta: float = 0.0,
    noise: Noise | None = None,
    clip_denoised: bool = False,
    callback: Callback | None = None,
) -> Tensor:
    """Samples by DDIM: without noise (eta 0), or with eta times that of the ancestral sampler's lower bound.

    Args:
        diffusion, denoiser, x, clip_denoised, callback: As in :func:`sample_ancestral`.
        eta: In [0, 1].
        noise: As in :func:`sample_ancestral`; needed where eta is above 0.

    Returns:
        (B, C, H, W) samples.

    Raises:
        ValueError: A bad x or eta, no noise for an eta above 0, or a denoiser's answer of a bad shape.
    """
    check_start(x)
    if not 0 <= eta <= 1:
        raise ValueError(f"eta={eta}: expected a number in [0, 1]")
    if eta > 0 and noise is None:
        raise ValueError(f"eta={eta} needs noise: give a torch.Generator, or a function of the step")
    total = len(diffusion)
    for step in range(total):
        index = total - 1 - step
        level = float(diffusion.alphas_cumprod[index])
        previous = float(diffusion.alphas_cumprod_prev[index])
        answer = diffusion.p_mean_variance(denoiser, x, _steps(x, index), clip_denoised=clip_denoised)
        std = eta * math.sqrt((1 - previous) / (1 - level) * (1 - level / previous))
        x = math.sqrt(previous) * answer.x0 + math.sqrt(1 - previous - std**2) * answer.noise
        if noise is not None and std > 0:
            x = x + std * draw(noise, step, x)
        if callback is not None:
            callback(step + 1, total)
    return x


@torch.no_grad()
def invert_ddim(
    diffusion: GaussianDiffusion, denoiser: Denoiser, x: Tensor, *, callback: Callback | None = None
) -> Tensor:
    """The noise from which DDIM (eta 0) comes near given images: its steps backwards.

    Each step takes the denoiser's answer at the step's cleaner end, so that the way back ends near the images,
    the nearer the more steps the chain has.

    Args:
        diffusion, denoiser, callback: As in :func:`sample_ancestral`.
        x: (B, C, H, W) images or latents, float32 or float64.

    Returns:
        (B, C, H, W) noise.

    Raises:
        ValueError: A bad x, or a denoiser's answer of a bad shape.
    """
    check_start(x)
    total = len(diffusion)
    for index in range(total):
        level = float(diffusion.alphas_cumprod[index])
        previous = float(diffusion.alphas_cumprod_prev[index])
        # images stand before the first step, where the denoiser was not trained: its first step is the nearest
        answer = diffusion.p_mean_variance(denoiser, x, _steps(x, max(index - 1, 0)))
        x0 = (x - math.sqrt(1 - previous) * answer.noise) / math.sqrt(previous)
        x = math.sqrt(level) * x0 + math.sqrt(1 - level) * answer.noise
        if callback is not None:
            callback(index + 1, total)
    return x
