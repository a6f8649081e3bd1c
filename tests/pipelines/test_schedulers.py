"""Sampling of diffusion through diffusers' schedulers against closed forms of Gaussian data."""

from collections.abc import Callable

import gaussian
import pytest
import torch
from scheduler_noise import scheduler_noise
from torch import Tensor

from lineardiff.generation import GaussianDiffusion

pytest.importorskip("diffusers")

from diffusers import DDPMScheduler

from lineardiff.pipelines.schedulers import sample_by_scheduler, sample_diffusion

UPPER, LOWER = GaussianDiffusion(variance="fixed_large"), GaussianDiffusion(variance="fixed_small")
LEVEL = float(UPPER.alphas_cumprod[-1])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def optimal(std: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The expected noise for data N(0, std^2), given the training step."""

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        level = UPPER.alphas_cumprod[t].reshape(-1, 1, 1, 1)
        return (1 - level).sqrt() / (level * std**2 + 1 - level) * x

    return denoise


def curved(x: Tensor, t: Tensor) -> Tensor:
    return torch.sin(x) + torch.cos(t / 300).reshape(-1, 1, 1, 1)


def ancestral_moments(diffusion: GaussianDiffusion, std: float, steps: int) -> tuple[float, float]:
    def sample(x: Tensor, *, noise: Callable[[int], Tensor]) -> Tensor:
        with scheduler_noise(noise):
            return sample_diffusion(diffusion, optimal(std), x, num_steps=steps)

    return gaussian.moments(sample, steps - 1)


@pytest.mark.parametrize("steps", [10, 100])
def test_ancestral_sampling_of_unit_data_is_exact(steps: int) -> None:
    """For N(0, 1) every x_t is N(0, 1), and the reverse step has the variance beta: "fixed_large" is right."""
    mean, variance = ancestral_moments(UPPER, 1.0, steps)
    assert mean == 0
    # the last step returns the expected data without noise
    assert variance == pytest.approx(float(UPPER.alphas_cumprod[0]), rel=1e-9)


def test_ancestral_sampling_of_narrow_data_converges() -> None:
    def error(steps: int) -> float:
        return abs(ancestral_moments(LOWER, 0.4, steps)[1] - 0.16)

    assert error(250) < 0.02
    assert error(250) < error(60) / 2


def test_ancestral_sampling_with_random_noise() -> None:
    generator, count = torch.Generator().manual_seed(0), 10_000
    z = torch.randn(count, 1, 1, 1, generator=generator, dtype=torch.float64)
    x = sample_diffusion(UPPER, optimal(1.0), z, num_steps=50, generator=generator)
    assert abs(float(x.mean())) < 5 / count**0.5
    assert abs(float(x.var()) - 1) < 5 * (2 / count) ** 0.5


def ddim(x: Tensor, steps: int, method: str = "ddim") -> Tensor:
    return sample_diffusion(UPPER, optimal(0.4), x, method=method, num_steps=steps)


def test_ddim_follows_the_ode_of_gaussian_data() -> None:
    z = normal(2, 1, 2, 2)
    exact = z * 0.4 / (LEVEL * 0.16 + 1 - LEVEL) ** 0.5
    errors = [float((ddim(z, steps) - exact).abs().max()) for steps in (250, 500)]
    assert errors[1] < 0.01
    assert errors[1] < 0.65 * errors[0]


def test_ddim_inversion_gives_unit_noise_and_leads_back() -> None:
    x, errors = 0.4 * normal(2, 1, 2, 2), []
    for steps in (250, 500):
        noise = ddim(x, steps, "ddim-inverse")
        errors.append(float((ddim(noise, steps) - x).abs().max()))
    torch.testing.assert_close(noise, x / 0.4 * (LEVEL * 0.16 + 1 - LEVEL) ** 0.5, rtol=0.03, atol=0)
    assert errors[1] < 0.02
    assert errors[1] < 0.65 * errors[0]


def test_ddim_with_eta_1_is_ancestral_sampling_with_the_posteriors_variance() -> None:
    z, noises = normal(2, 1, 3, 3), [normal(2, 1, 3, 3, seed=seed) for seed in range(20)]
    with scheduler_noise(noises.__getitem__):
        ancestral = sample_diffusion(LOWER, curved, z, num_steps=20)
    with scheduler_noise(noises.__getitem__):
        samples = sample_diffusion(LOWER, curved, z, method="ddim", num_steps=20, eta=1.0)
    torch.testing.assert_close(samples, ancestral)


@pytest.mark.parametrize("method", ["ddpm", "ddim"])
def test_a_learned_variance_is_used_by_ddpm_and_dropped_by_ddim(method: str) -> None:
    """At -1 the learned variance is the lower bound, that of the posterior."""
    samples = [
        sample_diffusion(
            diffusion,
            lambda x, t, share=share: torch.cat([curved(x, t), torch.full_like(x, share)], 1),
            normal(2, 1, 3, 3),
            method=method,
            num_steps=20,
            generator=torch.Generator().manual_seed(0),
        )
        for diffusion, share in ((LOWER, 0.0), (GaussianDiffusion(), -1.0), (GaussianDiffusion(), 1.0))
    ]
    torch.testing.assert_close(samples[1], samples[0])
    assert torch.equal(samples[2], samples[1]) == (method == "ddim")


def test_clipped_samples_stay_in_range() -> None:
    z = normal(2, 1, 3, 3)
    generator = torch.Generator().manual_seed(0)
    assert sample_diffusion(UPPER, curved, z, num_steps=20, generator=generator).abs().max() > 1
    for method in ("ddpm", "ddim"):
        x = sample_diffusion(
            UPPER, curved, z, method=method, num_steps=20, generator=generator, clip_denoised=True
        )
        assert x.abs().max() <= 1


def test_times_generator_and_gradients() -> None:
    z, seen = normal(2, 1, 2, 2).requires_grad_(), []

    def denoiser(x: Tensor, t: Tensor) -> Tensor:
        assert t.dtype == torch.int64
        seen.append(int(t[0]))
        return curved(x, t)

    def run(seed: int | None, method: str = "ddpm") -> Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return sample_diffusion(UPPER, denoiser, z, method=method, num_steps=7, generator=generator)

    state, times = torch.get_rng_state(), UPPER.respaced(7).timesteps.tolist()
    x = run(0)
    assert seen == times[::-1]
    assert torch.equal(x, run(0))
    assert not torch.equal(x, run(1))
    for method in ("ddim", "ddim-inverse"):
        seen.clear()
        assert not run(None, method).requires_grad
        assert seen == (times[::-1] if method == "ddim" else [0, *times[:-1]])
    assert torch.equal(state, torch.get_rng_state())


def test_bad_arguments() -> None:
    z = normal(1, 1, 2, 2)
    for options, words in (
        ({"method": "ddim", "eta": 1.5}, "eta=1.5"),
        ({"method": "ddim", "eta": float("nan")}, "eta=nan"),
        ({"eta": 0.5}, "eta=0.5"),
        ({"method": "dpm"}, "unknown method of diffusion 'dpm'"),
        ({"num_steps": 1}, "num_steps=1"),
        ({"x": z.bfloat16()}, "got torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            sample_diffusion(UPPER, curved, **{"x": z, "num_steps": 5, **options})
    scheduler = DDPMScheduler(variance_type="learned_range")
    with pytest.raises(ValueError, match=r"returned 1 channels .* needs 2"):
        sample_by_scheduler(scheduler, curved, z, num_steps=2)
