import gaussian
import pytest
import torch

from lineardiff.generation.paths import PATHS

T = torch.linspace(0.01, 0.99, 41, dtype=torch.float64)


@pytest.mark.parametrize("name", PATHS)
def test_levels_and_their_derivatives(name: str) -> None:
    p = PATHS[name](T)
    alpha, sigma = gaussian.levels(name, T)
    d_alpha, d_sigma = gaussian.rates(name, T)
    for ours, truth in ((p.alpha, alpha), (p.sigma, sigma), (p.d_alpha, d_alpha), (p.d_sigma, d_sigma)):
        torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(p.d_log_alpha, d_alpha / alpha)
    torch.testing.assert_close(p.score_weight, sigma**2 * d_alpha / alpha - sigma * d_sigma)


@pytest.mark.parametrize("name", PATHS)
def test_noise_at_0_and_data_at_1(name: str) -> None:
    p = PATHS[name](torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert p.alpha[0] < 0.01
    assert p.sigma[0] > 0.9999
    torch.testing.assert_close(p.alpha[1], torch.tensor(1.0, dtype=torch.float64))
    assert p.sigma[1] == 0


@pytest.mark.parametrize("name", PATHS)
def test_float32_keeps_its_digits_near_the_data(name: str) -> None:
    t = torch.tensor([1 - 1e-5, 1 - 1e-3])
    torch.testing.assert_close(
        PATHS[name](t).sigma.double(), PATHS[name](t.double()).sigma, rtol=3e-7, atol=0
    )


@pytest.mark.parametrize("name", PATHS)
def test_times_past_the_end_are_finite(name: str) -> None:
    p = PATHS[name](torch.linspace(1.001, 1.5, 100))
    assert all(field.isfinite().all() for field in p)
