from itertools import product

import gaussian
import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from lineardiff.generation import Interpolant, log_likelihood

pytest.importorskip("torchdiffeq")

TIGHT = {"rtol": 1e-8, "atol": 1e-8}


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("path", "prediction"), product(("linear", "gvp", "vp"), ("velocity", "score", "noise"))
)
def test_independent_gaussian_data(path: str, prediction: str) -> None:
    """The Jacobian is diagonal, so that the estimate is exact whatever the signs."""
    flow, x = Interpolant(path=path, prediction=prediction), data(3, 2, 2, 2)
    log_p, z = log_likelihood(
        flow, gaussian.optimal(path, prediction), x, probe=torch.Generator().manual_seed(0), **TIGHT
    )
    first, last = flow.sample_interval()
    (mean0, var0), (mean1, var1) = gaussian.marginal(path, first), gaussian.marginal(path, last)
    torch.testing.assert_close(z, mean0 + (x - mean1) * (var0 / var1) ** 0.5, rtol=1e-4, atol=1e-4)
    # the prior stands in for the marginal at the first time, which is not quite N(0, 1)
    prior = Normal(0.0, 1.0).log_prob(z) - Normal(mean0, var0**0.5).log_prob(z)
    truth = (Normal(mean1, var1**0.5).log_prob(x) + prior).sum((1, 2, 3))
    torch.testing.assert_close(log_p, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "atol"),
    [({"method": "heun", "num_steps": 200}, 1e-3), (TIGHT, 1e-6)],
    ids=["heun", "dopri5"],
)
def test_correlated_data_averaged_over_every_probe(arguments: dict[str, object], atol: float) -> None:
    """Two elements with a full covariance: the mean over the four probes is the trace itself."""
    covariance = torch.tensor([[0.5, 0.3], [0.3, 0.4]], dtype=torch.float64)

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        time = t[0]
        marginal = time**2 * covariance + (1 - time) ** 2 * torch.eye(2, dtype=torch.float64)
        residual = torch.linalg.solve(marginal, x.flatten(1).T)
        return (time * covariance @ residual - (1 - time) * residual).T.reshape(x.shape)

    x = data(3, 1, 1, 2)
    probes = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]]).reshape(4, 1, 1, 1, 2).expand(4, 3, 1, 1, 2)
    estimates = torch.stack(
        [log_likelihood(Interpolant(), velocity, x, probe=probe, **arguments)[0] for probe in probes]
    )
    truth = MultivariateNormal(torch.zeros(2, dtype=torch.float64), covariance).log_prob(x.flatten(1))
    torch.testing.assert_close(estimates.mean(0), truth, rtol=0, atol=atol)
    assert estimates.std(0).min() > 0.01


def test_probe_is_fixed_by_the_generator_and_one_for_the_whole_way() -> None:
    def network(x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(x.flip(3) + x)

    def run(seed: int, **arguments: object) -> Tensor:
        return log_likelihood(
            Interpolant(), network, data(2, 1, 3, 3), probe=torch.Generator().manual_seed(seed), **arguments
        )[0]

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    # an integral of noise drawn anew at each evaluation would not converge with the tolerance
    torch.testing.assert_close(run(0, **TIGHT), run(0, rtol=1e-6, atol=1e-6), rtol=1e-4, atol=1e-4)


def test_parameters_get_no_gradient_and_callback_is_called() -> None:
    scale, calls = torch.nn.Parameter(torch.ones(())), []
    log_p, z = log_likelihood(
        Interpolant(),
        lambda x, t: scale * x,
        data(2, 1, 2, 2).float(),
        probe=torch.Generator(),
        method="euler",
        num_steps=4,
        callback=lambda *call: calls.append(call),
    )
    assert not log_p.requires_grad
    assert not z.requires_grad
    assert scale.grad is None
    assert calls == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_bad_arguments() -> None:
    x = data(2, 1, 2, 2)
    with pytest.raises(ValueError, match="probe has shape"):
        log_likelihood(Interpolant(), lambda x, t: x, x, probe=x[:1])
    with pytest.raises(ValueError, match="got torch.float16"):
        log_likelihood(Interpolant(), lambda x, t: x, x.half(), probe=x)
