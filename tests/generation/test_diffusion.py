from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from lineardiff.generation import GaussianDiffusion
from lineardiff.generation.diffusion import discrete_log_likelihood, gaussian_kl

T = torch.tensor([0, 1, 250, 999])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(x: Tensor, t: Tensor) -> Tensor:
    return torch.cat([torch.sin(x) + t.reshape(-1, 1, 1, 1) / 1000, torch.cos(3 * x)], 1)


def test_tables_are_float64_and_those_of_the_paper() -> None:
    diffusion = GaussianDiffusion()
    betas = np.linspace(1e-4, 0.02, 1000)
    assert diffusion.alphas_cumprod.dtype == torch.float64
    np.testing.assert_allclose(diffusion.betas.numpy(), betas, rtol=1e-10)
    np.testing.assert_allclose(diffusion.alphas_cumprod.numpy(), np.cumprod(1 - betas), rtol=1e-12)
    assert len(diffusion) == 1000
    np.testing.assert_allclose(
        GaussianDiffusion(num_steps=100).betas[[0, -1]].numpy(), [1e-3, 0.2], rtol=1e-10
    )


def test_the_chain_step_by_step_has_the_marginals_of_q_sample() -> None:
    diffusion, x0 = GaussianDiffusion(), torch.ones(1, 1, 1, 1, dtype=torch.float64)
    mean, variance = 1.0, 0.0
    for t, beta in enumerate(diffusion.betas.tolist()):
        mean, variance = (1 - beta) ** 0.5 * mean, (1 - beta) * variance + beta
        if t in (0, 400, 999):
            index, zero = torch.tensor([t]), torch.zeros_like(x0)
            assert float(diffusion.q_sample(x0, index, zero)) == pytest.approx(mean)
            assert float(diffusion.q_sample(zero, index, x0)) ** 2 == pytest.approx(variance)


def test_posterior_is_bayes_rule() -> None:
    """N(x_t; sqrt(1 - beta) x_{t-1}, beta) N(x_{t-1}; sqrt(a') x_0, 1 - a'), normalised: precisions add."""
    diffusion, x0, x, t = GaussianDiffusion(), normal(3, 2, 2, 2), normal(3, 2, 2, 2, seed=1), T[1:]
    beta, previous = (
        table[t].reshape(-1, 1, 1, 1) for table in (diffusion.betas, diffusion.alphas_cumprod_prev)
    )
    precision = (1 - beta) / beta + 1 / (1 - previous)
    mean = ((1 - beta).sqrt() / beta * x + previous.sqrt() / (1 - previous) * x0) / precision
    posterior = diffusion.q_posterior(x0, x, t)
    torch.testing.assert_close(posterior.mean, mean)
    torch.testing.assert_close(posterior.variance, 1 / precision)
    torch.testing.assert_close(posterior.log_variance, -precision.log())


def test_first_step() -> None:
    diffusion, x0 = GaussianDiffusion(), normal(1, 2, 2, 2)
    posterior = diffusion.q_posterior(x0, normal(1, 2, 2, 2, seed=1), T[:1])
    torch.testing.assert_close(posterior.mean, x0)
    assert posterior.variance.max() == 0
    assert posterior.log_variance.isfinite().all()


def test_the_right_noise_gives_the_image_and_the_posterior() -> None:
    diffusion, x0, noise = GaussianDiffusion(), normal(4, 2, 2, 2), normal(4, 2, 2, 2, seed=1)
    x = diffusion.q_sample(x0, T, noise)
    step = diffusion.p_mean_variance(lambda x, t: torch.cat([noise, noise], 1), x, T)
    torch.testing.assert_close(step.x0, x0)
    torch.testing.assert_close(step.mean, diffusion.q_posterior(x0, x, T).mean)


def test_learned_range_goes_from_the_posteriors_variance_to_beta() -> None:
    diffusion, x = GaussianDiffusion(), normal(4, 1, 2, 2)
    for value, table in ((-1.0, "fixed_small"), (1.0, "fixed_large")):
        fixed = GaussianDiffusion(variance=table).p_mean_variance(lambda x, t: 0 * x, x, T)
        learned = diffusion.p_mean_variance(
            lambda x, t, v=value: torch.cat([0 * x, torch.full_like(x, v)], 1), x, T
        )
        last = slice(
            1, None
        )  # at the first step "fixed_large" takes the second step's posterior, as DDPM does
        torch.testing.assert_close(learned.variance[last], fixed.variance.expand_as(x)[last])
    torch.testing.assert_close(fixed.variance[1:].flatten(), diffusion.betas[T[1:]])


def test_kl_is_that_of_torch() -> None:
    mean1, mean2, log1, log2 = (normal(50, seed=seed) for seed in range(4))
    truth = kl_divergence(Normal(mean1, (log1 / 2).exp()), Normal(mean2, (log2 / 2).exp()))
    torch.testing.assert_close(gaussian_kl(mean1, log1, mean2, log2), truth)


def test_the_256_levels_have_all_of_the_probability() -> None:
    levels = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    for mean, std in ((0.1, 0.2), (-0.9, 0.5), (1.3, 0.1)):
        log = discrete_log_likelihood(
            levels,
            mean=torch.full((256,), mean, dtype=torch.float64),
            log_std=torch.full((256,), std, dtype=torch.float64).log(),
        )
        assert float(log.exp().sum()) == pytest.approx(1)
        truth = Normal(mean, std).cdf(levels + 1 / 255) - Normal(mean, std).cdf(levels - 1 / 255)
        truth[0], truth[-1] = (
            Normal(mean, std).cdf(levels[0] + 1 / 255),
            1 - Normal(mean, std).cdf(levels[-1] - 1 / 255),
        )
        torch.testing.assert_close(log.exp(), truth, rtol=0, atol=3e-4)


def test_hybrid_loss() -> None:
    diffusion, x0, noise = GaussianDiffusion(), 0.5 * normal(4, 1, 4, 4), normal(4, 1, 4, 4, seed=1)
    losses = diffusion.training_losses(network, x0, T, noise)
    torch.testing.assert_close(losses["loss"], losses["mse"] + losses["vb"])
    x = diffusion.q_sample(x0, T, noise)
    answer = network(x, T)
    torch.testing.assert_close(losses["mse"], (answer[:, :1] - noise).square().mean((1, 2, 3)))
    model, truth = diffusion.p_mean_variance(network, x, T), diffusion.q_posterior(x0, x, T)
    kl = kl_divergence(
        Normal(truth.mean, truth.variance.sqrt().clamp(min=1e-30)), Normal(model.mean, model.variance.sqrt())
    )
    torch.testing.assert_close(losses["vb"][1:], kl.mean((1, 2, 3))[1:] / np.log(2))


def test_the_bound_trains_the_variance_alone() -> None:
    heads = torch.zeros(2, dtype=torch.float64, requires_grad=True)

    def model(x: Tensor, t: Tensor) -> Tensor:
        return torch.cat([heads[0] + 0 * x, heads[1] + 0 * x], 1)

    x0, noise = normal(4, 1, 4, 4), normal(4, 1, 4, 4, seed=1)
    losses = GaussianDiffusion().training_losses(model, x0, T, noise)
    (of_vb,) = torch.autograd.grad(losses["vb"].sum(), heads, retain_graph=True)
    (of_mse,) = torch.autograd.grad(losses["mse"].sum(), heads)
    assert of_vb[0] == 0
    assert of_vb[1] != 0
    assert of_mse[0] != 0
    assert of_mse[1] == 0


def test_a_fixed_variance_has_the_error_alone() -> None:
    losses = GaussianDiffusion(variance="fixed_large").training_losses(
        lambda x, t: x, normal(4, 1, 2, 2), T, normal(4, 1, 2, 2, seed=1)
    )
    assert set(losses) == {"loss", "mse"}
    assert torch.equal(losses["loss"], losses["mse"])


def test_respacing_keeps_the_marginals_and_tells_the_network_the_training_step() -> None:
    diffusion = GaussianDiffusion()
    short = diffusion.respaced(250)
    assert len(short) == 250
    assert short.timesteps[[0, -1]].tolist() == [0, 999]
    assert {b - a for a, b in pairwise(short.timesteps.tolist())} == {4, 5}
    torch.testing.assert_close(
        short.alphas_cumprod, diffusion.alphas_cumprod[short.timesteps], rtol=1e-14, atol=0
    )
    torch.testing.assert_close((1 - short.betas).cumprod(0), short.alphas_cumprod, rtol=1e-12, atol=0)
    seen = []

    def record(x: Tensor, t: Tensor) -> Tensor:
        seen.append(t)
        return network(x, t)

    short.p_mean_variance(record, normal(2, 1, 2, 2), torch.tensor([0, 249]))
    assert seen[0].tolist() == [0, 999]
    assert diffusion.respaced([3, 7, 500]).timesteps.tolist() == [3, 7, 500]
    assert (
        short.respaced(250).timesteps.tolist() == short.timesteps.tolist()
    )  # of the training chain, not of itself
    assert GaussianDiffusion(variance="fixed_small").respaced(10).variance == "fixed_small"


def test_sample_times() -> None:
    steps = GaussianDiffusion().sample_times(20_000, generator=torch.Generator().manual_seed(0))
    assert steps.dtype == torch.int64
    assert steps.min() == 0
    assert steps.max() == 999
    assert abs(float(steps.double().mean()) - 499.5) < 5 * 288.7 / 20_000**0.5


def test_low_precision_outputs_are_read_in_float32() -> None:
    diffusion, x0, noise = GaussianDiffusion(), normal(4, 1, 4, 4).float(), normal(4, 1, 4, 4, seed=1).float()
    losses = diffusion.training_losses(lambda x, t: network(x, t).bfloat16(), x0, T, noise)
    assert all(loss.dtype == torch.float32 and loss.isfinite().all() for loss in losses.values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"variance": "learned"}, "unknown variance 'learned'"),
        ({"num_steps": 20}, "num_steps=20"),
        ({"timesteps": [5]}, "1 timesteps"),
        ({"timesteps": [5, 4]}, "increasing"),
        ({"timesteps": [0, 1000]}, "from 0 to 999"),
        ({"timesteps": [-1, 3]}, "from 0 to 999"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GaussianDiffusion(**arguments)


def test_bad_calls() -> None:
    diffusion, x = GaussianDiffusion(), normal(4, 1, 2, 2)
    for steps in (1, 1001):
        with pytest.raises(ValueError, match=f"steps={steps}"):
            diffusion.respaced(steps)
    with pytest.raises(ValueError, match="'learned_range' needs 2 channels"):
        diffusion.p_mean_variance(lambda x, t: x, x, T)
    with pytest.raises(ValueError, match="'fixed_small' needs 1 channels"):
        GaussianDiffusion(variance="fixed_small").p_mean_variance(network, x, T)
    for t in (T.double(), T[:2]):
        with pytest.raises(ValueError, match="expected int64 of shape"):
            diffusion.training_losses(network, x, t, x)
        with pytest.raises(ValueError, match="expected int64 of shape"):
            diffusion.p_mean_variance(network, x, t)
