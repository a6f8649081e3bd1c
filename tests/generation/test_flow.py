from itertools import product

import gaussian
import pytest
import torch
from torch import Tensor

from lineardiff.generation import Interpolant

PATH_NAMES = ("linear", "gvp", "vp")
PREDICTIONS = ("velocity", "score", "noise")
FORMS = ("constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing")
T = torch.tensor([0.05, 0.3, 0.5, 0.8, 0.97], dtype=torch.float64)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("path", "prediction"), product(PATH_NAMES, PREDICTIONS))
def test_velocity_and_score_follow_from_any_prediction(path: str, prediction: str) -> None:
    flow = Interpolant(path=path, prediction=prediction)
    x = normal(5, 2, 3, 3)
    output = gaussian.optimal(path, prediction)(x, T)
    torch.testing.assert_close(flow.velocity(output, x, T), gaussian.optimal(path, "velocity")(x, T))
    torch.testing.assert_close(flow.score(output, x, T), gaussian.optimal(path, "score")(x, T))


def test_score_of_a_velocity_is_finite_at_the_noise() -> None:
    for path in PATH_NAMES:
        x, t = normal(2, 1, 2, 2), torch.zeros(2, dtype=torch.float64)
        output = gaussian.optimal(path, "velocity")(x, t)
        torch.testing.assert_close(
            Interpolant(path=path).score(output, x, t), gaussian.optimal(path, "score")(x, t)
        )


@pytest.mark.parametrize("path", PATH_NAMES)
def test_target_velocity_is_the_derivative_of_the_mix(path: str) -> None:
    flow, x1, noise = Interpolant(path=path), normal(5, 2, 3, 3), normal(5, 2, 3, 3, seed=1)
    _, derivative = torch.func.jvp(lambda t: flow.mix(x1, t, noise), (T,), (torch.ones_like(T),))
    torch.testing.assert_close(flow.target_velocity(x1, T, noise), derivative)


@pytest.mark.parametrize(("path", "prediction"), product(PATH_NAMES, ("score", "noise")))
def test_weightings(path: str, prediction: str) -> None:
    """The weighted losses are errors of the velocity and, over the SDE's diffusion, of the score."""
    x1, noise = normal(5, 2, 3, 3), normal(5, 2, 3, 3, seed=1)

    def network(x: Tensor, t: Tensor) -> Tensor:
        return torch.tanh(x) + t.reshape(-1, 1, 1, 1)

    def loss(weighting: str) -> Tensor:
        flow = Interpolant(path=path, prediction=prediction, weighting=weighting)
        return flow.training_losses(network, x1, T, noise)["loss"]

    flow = Interpolant(path=path, prediction=prediction)
    x = flow.mix(x1, T, noise)
    output = network(x, T)
    _, sigma = gaussian.levels(path, T.reshape(-1, 1, 1, 1))
    velocity_error = flow.velocity(output, x, T) - flow.target_velocity(x1, T, noise)
    score_error = flow.score(output, x, T) + noise / sigma
    torch.testing.assert_close(loss("velocity"), velocity_error.square().mean((1, 2, 3)))
    torch.testing.assert_close(loss("none"), (sigma * score_error).square().mean((1, 2, 3)))
    likelihood = flow.diffusion(T, "sbdm") * score_error.square().mean((1, 2, 3))
    torch.testing.assert_close(loss("likelihood"), likelihood)


@pytest.mark.parametrize(("path", "prediction"), product(PATH_NAMES, PREDICTIONS))
def test_the_optimum_has_the_least_loss(path: str, prediction: str) -> None:
    flow = Interpolant(path=path, prediction=prediction)
    noise = normal(512, 1, 8, 8)
    x1 = gaussian.MEAN + gaussian.STD * normal(512, 1, 8, 8, seed=1)
    t = 0.1 + 0.8 * torch.rand(512, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    best = gaussian.optimal(path, prediction)

    def loss(factor: float) -> float:
        return float(flow.training_losses(lambda x, t: factor * best(x, t), x1, t, noise)["loss"].mean())

    assert loss(1.0) < min(loss(0.9), loss(1.1))


def test_losses_carry_gradients_and_one_value_a_sample() -> None:
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    losses = Interpolant().training_losses(lambda x, t: scale * x, normal(5, 1, 2, 2), T, normal(5, 1, 2, 2))
    assert losses["loss"].shape == (5,)
    losses["loss"].mean().backward()
    assert scale.grad.abs() > 0


@pytest.mark.parametrize("form", FORMS)
def test_diffusion_is_finite_and_not_negative(form: str) -> None:
    for path in PATH_NAMES:
        w = Interpolant(path=path).diffusion(T, form)
        assert w.shape == T.shape
        assert w.isfinite().all()
        assert (w >= 0).all()


def test_diffusion_values() -> None:
    flow, t = Interpolant(path="vp"), torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    for form, values in {
        "constant": [2, 2, 2],
        "sbdm": [20, 10.05, 0.1],  # 2 beta / 2
        "linear": [2, 1, 0],
        "increasing-decreasing": [0, 2, 0],  # the authors' misspelt name cannot be reached
    }.items():
        torch.testing.assert_close(
            flow.diffusion(t, form, norm=2.0), torch.tensor(values, dtype=torch.float64)
        )
    torch.testing.assert_close(
        flow.diffusion(t, "decreasing"), torch.tensor([1, 0.25, 0], dtype=torch.float64)
    )


@pytest.mark.parametrize(
    ("arguments", "training", "ode", "sbdm", "sigma", "no_last_step"),
    [
        # the authors' choices, but for "sbdm" and the missing last step of a velocity, which were NaN
        (("linear", "velocity"), (0, 1), (0, 1), (1e-3, 0.96), (0, 0.96), (0, 0.999)),
        (("gvp", "velocity"), (0, 1), (0, 1), (1e-3, 0.96), (0, 0.96), (0, 0.999)),
        (("linear", "noise"), (1e-3, 0.999), (1e-3, 0.999), (1e-3, 0.96), (1e-3, 0.96), (1e-3, 0.999)),
        (("gvp", "score"), (1e-3, 0.999), (1e-3, 0.999), (1e-3, 0.96), (1e-3, 0.96), (1e-3, 0.999)),
        (("vp", "velocity"), (0, 1 - 1e-5), (0, 0.999), (0, 0.96), (0, 0.96), (0, 0.999)),
        (("vp", "score"), (0, 1 - 1e-5), (0, 0.999), (0, 0.96), (0, 0.96), (0, 0.999)),
    ],
)
def test_intervals(arguments, training, ode, sbdm, sigma, no_last_step) -> None:
    flow = Interpolant(path=arguments[0], prediction=arguments[1])
    assert flow.train_interval() == pytest.approx(training)
    assert flow.sample_interval() == pytest.approx(ode)
    assert flow.sample_interval(diffusion_form="sbdm", last_step_size=0.04) == pytest.approx(sbdm)
    assert flow.sample_interval(diffusion_form="sigma", last_step_size=0.04) == pytest.approx(sigma)
    assert flow.sample_interval(diffusion_form="sigma") == pytest.approx(no_last_step)


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_given_epsilons_are_honoured(prediction: str) -> None:
    """The authors' code drops both for a velocity, and the one for sampling unless both are given."""
    flow = Interpolant(prediction=prediction, train_eps=0.02, sample_eps=0.03)
    assert flow.train_interval() == pytest.approx((0.02, 0.98))
    assert flow.sample_interval() == pytest.approx((0.03, 0.97))
    assert flow.sample_interval(diffusion_form="sigma", last_step_size=0.1) == pytest.approx((0.03, 0.9))
    assert Interpolant(path="vp", prediction=prediction, sample_eps=0.03).sample_interval() == (0, 0.97)
    one = Interpolant(prediction="noise", train_eps=0.02)
    assert one.sample_interval() == pytest.approx((1e-3, 0.999))


def test_sample_times_are_uniform_over_the_interval_and_repeatable() -> None:
    flow = Interpolant(prediction="noise", train_eps=0.1)
    t = flow.sample_times(10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(t, flow.sample_times(10_000, generator=torch.Generator().manual_seed(0)))
    assert t.min() >= 0.1
    assert t.max() <= 0.9
    # five standard errors of the mean of a uniform variable
    assert abs(float(t.mean()) - 0.5) < 5 * 0.8 / 12**0.5 / 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"path": "Linear"}, "unknown path 'Linear'"),
        (
            {"prediction": "epsilon"},
            "unknown prediction 'epsilon'",
        ),  # the authors' code takes it for velocity
        ({"prediction": "noise", "weighting": "snr"}, "unknown weighting 'snr'"),  # and this for none
        ({"weighting": "likelihood"}, "requires prediction 'score' or 'noise'"),
        ({"train_eps": -0.1}, "train_eps=-0.1"),
        ({"sample_eps": 0.5}, "sample_eps=0.5"),
        ({"prediction": "noise", "sample_eps": 0}, "above 0 for prediction 'noise'"),
        ({"path": "vp", "train_eps": 0}, "above 0 for prediction 'velocity' on path 'vp'"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Interpolant(**arguments)


def test_bad_form_and_bad_answer() -> None:
    with pytest.raises(ValueError, match="unknown diffusion form 'SBDM'"):
        Interpolant().diffusion(T, "SBDM")
    with pytest.raises(ValueError, match="drop the channels of a learned variance"):
        Interpolant().training_losses(
            lambda x, t: torch.cat([x, x], 1), normal(5, 1, 2, 2), T, normal(5, 1, 2, 2)
        )
