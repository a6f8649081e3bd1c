"""Gaussian diffusion gives the numbers of DiT's authors' code."""

from pathlib import Path

import pytest
import torch
from recorded import normal, read
from torch import Tensor

from lineardiff.generation import GaussianDiffusion, sample_ancestral, sample_ddim

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
    ddpm, ddim = diffusion.respaced(250), diffusion.respaced(50)
    return {
        "q_sample": x,
        "p_mean": step.mean,
        "p_variance": step.variance,
        "p_log_variance": step.log_variance,
        "pred_xstart": step.x0,
        "timesteps250": ddpm.timesteps.float(),
        "timesteps50": ddim.timesteps.float(),
        "ddpm250": sample_ancestral(ddpm, toy, z, noise=lambda i: normal(f"step{i}", *SHAPE)),
        "ddim50": sample_ddim(ddim, toy, z),
        **diffusion.training_losses(toy, x0, t, noise),
    }


def test_every_value(ours: dict[str, Tensor], parity_data: Path) -> None:
    recorded = read(parity_data / "dit_gaussian_diffusion.safetensors").tensors
    assert set(ours) == set(recorded)
    for name, values in recorded.items():
        torch.testing.assert_close(
            ours[name], values, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
