from functools import partial

import gaussian
import pytest
import torch
from torch import Tensor

from lineardiff.generation import GaussianDiffusion, invert_ddim, sample_ancestral, sample_ddim

TRAINING = GaussianDiffusion(variance="fixed_large")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def optimal(std: float):
    """The expected noise for data N(0, std^2), given the training step."""

    def denoise(x: Tensor, t: Tensor) -> Tensor:
        level = TRAINING.alphas_cumprod[t].reshape(-1, 1, 1, 1)
        return (1 - level).sqrt() / (level * std**2 + 1 - level) * x

    return denoise


def curved(x: Tensor, t: Tensor) -> Tensor:
    return torch.sin(x) + torch.cos(t / 300).reshape(-1, 1, 1, 1)


@pytest.mark.parametrize("steps", [10, 100])
def test_ancestral_sampling_of_unit_data_is_exact(steps: int) -> None:
    """For N(0, 1) every x_t is N(0, 1), and the reverse step has the variance beta: "fixed_large" is right."""
    chain = TRAINING.respaced(steps)
    mean, variance = gaussian.moments(partial(sample_ancestral, chain, optimal(1.0)), steps - 1)
    assert mean == 0
    # the last step returns the expected data without noise
    assert variance == pytest.approx(float(chain.alphas_cumprod[0]), rel=1e-9)


def test_ancestral_sampling_of_narrow_data_converges() -> None:
    def error(steps: int) -> float:
        chain = GaussianDiffusion(variance="fixed_small").respaced(steps)
        return abs(gaussian.moments(partial(sample_ancestral, chain, optimal(0.4)), steps - 1)[1] - 0.16)

    assert error(250) < 0.02
    assert error(250) < error(60) / 2


def test_ancestral_sampling_with_random_noise() -> None:
    generator, count = torch.Generator().manual_seed(0), 10_000
    z = torch.randn(count, 1, 1, 1, generator=generator, dtype=torch.float64)
    x = sample_ancestral(TRAINING.respaced(50), optimal(1.0), z, noise=generator)
    assert abs(float(x.mean())) < 5 / count**0.5
    assert abs(float(x.var()) - 1) < 5 * (2 / count) ** 0.5


def test_ddim_follows_the_ode_of_gaussian_data() -> None:
    z, level = normal(2, 1, 2, 2), float(TRAINING.alphas_cumprod[-1])
    exact = z * 0.4 / (level * 0.16 + 1 - level) ** 0.5

    def error(steps: int) -> float:
        return float((sample_ddim(TRAINING.respaced(steps), optimal(0.4), z) - exact).abs().max())

    assert error(500) < 0.01
    assert error(500) < 0.65 * error(250)


def test_ddim_there_and_back() -> None:
    x = 0.4 * normal(2, 1, 2, 2)

    def error(steps: int) -> float:
        chain = TRAINING.respaced(steps)
        noise = invert_ddim(chain, optimal(0.4), x)
        return float((sample_ddim(chain, optimal(0.4), noise) - x).abs().max())

    assert error(500) < 0.02
    assert error(500) < 0.65 * error(250)


def test_inverted_data_is_unit_noise() -> None:
    x, level = 0.4 * normal(1, 1, 2, 2), float(TRAINING.alphas_cumprod[-1])
    noise = invert_ddim(TRAINING.respaced(500), optimal(0.4), x)
    torch.testing.assert_close(noise, x / 0.4 * (level * 0.16 + 1 - level) ** 0.5, rtol=0.03, atol=0)


def test_ddim_with_eta_1_is_ancestral_sampling_with_the_posteriors_variance() -> None:
    chain, z = GaussianDiffusion(variance="fixed_small").respaced(20), normal(2, 1, 3, 3)
    noises = [normal(2, 1, 3, 3, seed=seed) for seed in range(20)]
    ancestral = sample_ancestral(chain, curved, z, noise=noises.__getitem__)
    torch.testing.assert_close(sample_ddim(chain, curved, z, eta=1.0, noise=noises.__getitem__), ancestral)


def test_a_learned_variance_is_used() -> None:
    def chain(variance: str) -> GaussianDiffusion:
        return GaussianDiffusion(variance=variance).respaced(20)

    def learned(x: Tensor, t: Tensor) -> Tensor:
        return torch.cat([curved(x, t), torch.full_like(x, -1.0)], 1)

    z = normal(2, 1, 3, 3)
    noises = [normal(2, 1, 3, 3, seed=seed) for seed in range(20)]
    torch.testing.assert_close(
        sample_ancestral(chain("learned_range"), learned, z, noise=noises.__getitem__),
        sample_ancestral(chain("fixed_small"), curved, z, noise=noises.__getitem__),
    )
    torch.testing.assert_close(
        sample_ddim(chain("learned_range"), learned, z), sample_ddim(chain("fixed_small"), curved, z)
    )


def test_clipped_samples_stay_in_range() -> None:
    chain, z = TRAINING.respaced(20), normal(2, 1, 3, 3)
    noise = torch.Generator().manual_seed(0)
    assert sample_ancestral(chain, curved, z, noise=noise).abs().max() > 1
    assert sample_ancestral(chain, curved, z, noise=noise, clip_denoised=True).abs().max() <= 1
    assert sample_ddim(chain, curved, z, clip_denoised=True).abs().max() <= 1


def test_callback_generator_and_training_steps() -> None:
    chain, z = TRAINING.respaced(7), normal(2, 1, 2, 2).requires_grad_()
    calls: list[tuple[int, int]] = []
    seen: list[int] = []

    def denoiser(x: Tensor, t: Tensor) -> Tensor:
        assert t.dtype == torch.int64
        seen.append(int(t[0]))
        return curved(x, t)

    def run(seed: int) -> Tensor:
        return sample_ancestral(
            chain,
            denoiser,
            z,
            noise=torch.Generator().manual_seed(seed),
            callback=lambda *call: calls.append(call),
        )

    state = torch.get_rng_state()
    x = run(0)
    assert calls == [(step, 7) for step in range(1, 8)]
    assert seen == chain.timesteps.flip(0).tolist()
    assert torch.equal(x, run(0))
    assert not torch.equal(x, run(1))
    assert torch.equal(state, torch.get_rng_state())
    for sample in (sample_ddim, invert_ddim):
        calls.clear()
        assert not sample(chain, denoiser, z, callback=lambda *call: calls.append(call)).requires_grad
        assert calls == [(step, 7) for step in range(1, 8)]


def test_bad_arguments() -> None:
    chain, z = TRAINING.respaced(5), normal(1, 1, 2, 2)
    with pytest.raises(ValueError, match="eta=1.5"):
        sample_ddim(chain, curved, z, eta=1.5)
    with pytest.raises(ValueError, match=r"eta=0.5 needs noise"):
        sample_ddim(chain, curved, z, eta=0.5)
    with pytest.raises(ValueError, match="got torch.bfloat16"):
        sample_ddim(chain, curved, z.bfloat16())
    with pytest.raises(ValueError, match=r"noise\(0\) has shape"):
        sample_ancestral(chain, curved, z, noise=lambda step: torch.zeros(3))
