"""Our DDPM and DDIM against diffusers' schedulers, on the same denoiser, start and noise."""

import pytest
import torch
from torch import Tensor

from lineardiff.generation import GaussianDiffusion, sample_ancestral, sample_ddim

diffusers = pytest.importorskip("diffusers")

SHAPE = (2, 3, 4, 4)
TRAINING = {"num_train_timesteps": 1000, "beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}


def curved(x: Tensor, t: Tensor) -> Tensor:
    """Near the noise of unit data, so that samples stay of order 1, with a learned variance."""
    noise = 0.7 * torch.tanh(x) + 0.1 * torch.sin(t / 100).reshape(-1, 1, 1, 1)
    return torch.cat([noise, torch.cos(2 * x)], 1)


def start() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("steps", [1000, 250])
def test_ddpm(steps: int, clip: bool) -> None:
    chain = GaussianDiffusion().respaced(steps)
    scheduler = diffusers.DDPMScheduler(**TRAINING, variance_type="learned_range", clip_sample=clip)
    scheduler.set_timesteps(timesteps=chain.timesteps.flip(0).tolist())
    generator, x = torch.Generator().manual_seed(0), start()
    for t in scheduler.timesteps:
        x = scheduler.step(curved(x, t.expand(len(x))), t, x, generator=generator).prev_sample
    ours = sample_ancestral(
        chain, curved, start(), noise=torch.Generator().manual_seed(0), clip_denoised=clip
    )
    torch.testing.assert_close(ours, x, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("eta", "clip"), [(0.0, False), (0.0, True), (0.5, False), (1.0, False)])
def test_ddim(eta: float, clip: bool) -> None:
    scheduler = diffusers.DDIMScheduler(**TRAINING, clip_sample=clip, set_alpha_to_one=True)
    scheduler.set_timesteps(50)
    chain = GaussianDiffusion().respaced(scheduler.timesteps.flip(0).tolist())
    noises = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)) for step in range(50)]
    x = start()
    for noise, t in zip(noises, scheduler.timesteps, strict=True):
        answer = curved(x, t.expand(len(x)))[:, :3]
        x = scheduler.step(
            answer, t, x, eta=eta, use_clipped_model_output=clip, variance_noise=noise if eta else None
        ).prev_sample
    ours = sample_ddim(chain, curved, start(), eta=eta, noise=noises.__getitem__, clip_denoised=clip)
    torch.testing.assert_close(ours, x, rtol=1e-3, atol=1e-3)
