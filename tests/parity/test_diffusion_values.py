"""Gaussian diffusion and diffusers' samplers give the numbers of the DiT authors' code."""

from pathlib import Path

import pytest
import torch
from recorded import normal, read
from scheduler_noise import scheduler_noise
from torch import Tensor

from lineardiff.generation import GaussianDiffusion

pytest.importorskip("diffusers")

from lineardiff.pipelines.schedulers import sample_diffusion

SHAPE = (2, 4, 8, 8)


def toy(x: Tensor, t: Tensor) -> Tensor:
    return torch.cat([0.3 * x + 0.1 * torch.sin(t / 100).reshape(-1, 1, 1, 1), 0.2 * torch.tanh(x)], 1)


@pytest.fixture(scope="module")
def ours() -> dict[str, Tensor]:
    diffusion = GaussianDiffusion()
    x0, noise, z = 0.8 * normal("x0", 6, 4, 8, 8), normal("noise", 6, 4, 8, 8), normal("z", *SHAPE)
    t = torch.tensor([0, 1, 250, 500, 750, 999])
    x = diffusion.q_sample(x0, t, noise)
    step = diffusion.p_mean_variance(toy, x, t)
    with scheduler_noise(lambda i: normal(f"step{i}", *SHAPE)):
        ddpm = sample_diffusion(diffusion, toy, z, method="ddpm", num_steps=250)
    return {
        "q_sample": x,
        "p_mean": step.mean,
        "p_variance": step.variance,
        "p_log_variance": step.log_variance,
        "pred_xstart": step.x0,
        "timesteps250": diffusion.respaced(250).timesteps.float(),
        "timesteps50": diffusion.respaced(50).timesteps.float(),
        "ddpm250": ddpm,
        "ddim50": sample_diffusion(diffusion, toy, z, method="ddim", num_steps=50),
        **diffusion.training_losses(toy, x0, t, noise),
    }


def test_every_value(ours: dict[str, Tensor], parity_data: Path) -> None:
    recorded = read(parity_data / "dit_gaussian_diffusion.safetensors").tensors
    assert set(ours) == set(recorded)
    for name, values in recorded.items():
        torch.testing.assert_close(
            ours[name], values, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
