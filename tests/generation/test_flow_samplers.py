import math
import subprocess
import sys
from functools import partial
from itertools import product

import gaussian
import pytest
import torch
from torch import Tensor

from lineardiff.generation import Interpolant, sample_ode, sample_sde, solve_ode

pytest.importorskip("torchdiffeq")

PATH_NAMES = ("linear", "gvp", "vp")
PREDICTIONS = ("velocity", "score", "noise")
FORMS = ("constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing")
EVERY = list(product(PATH_NAMES, PREDICTIONS))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def exact_ode(flow: Interpolant, z: Tensor) -> Tensor:
    """The ODE of Gaussian data keeps each element's number of standard deviations."""
    first, last = flow.sample_interval()
    (mean0, var0), (mean1, var1) = gaussian.marginal(flow.path, first), gaussian.marginal(flow.path, last)
    return mean1 + (z - mean0) * (var1 / var0) ** 0.5


@pytest.mark.parametrize(("path", "prediction"), EVERY)
def test_ode_and_its_way_back(path: str, prediction: str) -> None:
    flow, z = Interpolant(path=path, prediction=prediction), normal(2, 1, 2, 2)
    denoiser = gaussian.optimal(path, prediction)
    x = sample_ode(flow, denoiser, z, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(x, exact_ode(flow, z), rtol=1e-5, atol=1e-5)
    back = sample_ode(flow, denoiser, x, rtol=1e-8, atol=1e-8, reverse=True)
    torch.testing.assert_close(back, z, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun"])
def test_equal_steps_treat_each_sample_alone(method: str) -> None:
    flow, z = Interpolant(), normal(3, 1, 2, 2)
    denoiser = gaussian.optimal("linear", "velocity")
    together = sample_ode(flow, denoiser, z, method=method, num_steps=100)
    torch.testing.assert_close(together, exact_ode(flow, z), rtol=0.02, atol=0.02)
    torch.testing.assert_close(sample_ode(flow, denoiser, z[:1], method=method, num_steps=100), together[:1])


def test_dopri5_depends_on_the_batch_within_its_tolerances() -> None:
    flow, z = Interpolant(), normal(8, 1, 4, 4)
    z[1:] *= 30

    def denoiser(x: Tensor, t: Tensor) -> Tensor:
        return torch.sin(3 * x) + torch.cos(9 * t).reshape(-1, 1, 1, 1)

    def difference(rtol: float) -> float:
        together, alone = (sample_ode(flow, denoiser, x, rtol=rtol)[0] for x in (z, z[:1]))
        return float((together - alone).abs().max())

    assert 1e-7 < difference(1e-3) < 0.1
    assert difference(1e-6) < difference(1e-3) / 10


def test_default_ode_of_the_vp_path_stays_finite_in_float32() -> None:
    """dopri5 tries times past the end, where sigma^2 would be negative."""
    flow = Interpolant(path="vp", prediction="noise")
    for seed in range(10):
        z = normal(1, 1, 2, 2, seed=seed).float()
        assert sample_ode(flow, lambda x, t: 0.9 * x, z).isfinite().all()


EVERY_SDE = [*product(PATH_NAMES, ["velocity"], FORMS), *product(PATH_NAMES, ["score", "noise"], ["sigma"])]


@pytest.mark.parametrize(("path", "prediction", "form"), EVERY_SDE)
@pytest.mark.parametrize("method", ["euler", "heun"])
def test_sde_has_the_marginals_of_the_path(path: str, prediction: str, form: str, method: str) -> None:
    """Mean and variance, exact over all noises, from the marginal at the first time."""
    flow, denoiser = Interpolant(path=path, prediction=prediction), gaussian.optimal(path, prediction)
    first, last = flow.sample_interval(diffusion_form=form)
    mean, variance = gaussian.marginal(path, first)
    truth = torch.tensor(gaussian.marginal(path, last))

    def error(num_steps: int) -> float:
        sample = partial(
            sample_sde,
            flow,
            denoiser,
            method=method,
            diffusion_form=form,
            num_steps=num_steps,
            last_step=None,
        )
        found = gaussian.moments(sample, num_steps, mean=mean, variance=variance)
        return float((torch.tensor(found) - truth).abs().max())

    coarse, fine = error(20), error(40)
    assert fine < 0.03
    assert fine < 0.7 * coarse


def test_sde_with_random_noise_has_the_marginal() -> None:
    flow, count = Interpolant(), 4096
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(count, 1, 1, 1, generator=generator, dtype=torch.float64)
    x = sample_sde(flow, gaussian.optimal("linear", "velocity"), z, noise=generator, num_steps=100).flatten()
    # five standard errors of a Gaussian's mean and variance
    assert abs(float(x.mean()) - gaussian.MEAN) < 5 * gaussian.STD / count**0.5
    # the last step, without noise, shrinks the spread: E[x_1 | x_0.96] has this variance
    (alpha, sigma), s2 = (0.96, 0.04), gaussian.STD**2
    spread = alpha**2 * s2**2 / (alpha**2 * s2 + sigma**2)
    assert float(x.var()) == pytest.approx(spread, rel=5 * (2 / count) ** 0.5 + 0.01)


@pytest.mark.parametrize(("path", "prediction"), EVERY)
@pytest.mark.parametrize("last_step", ["mean", "euler"])
def test_last_steps(path: str, prediction: str, last_step: str) -> None:
    flow, denoiser, h = Interpolant(path=path, prediction=prediction), gaussian.optimal(path, prediction), 0.1
    z = normal(2, 1, 2, 2)
    noises = [normal(2, 1, 2, 2, seed=seed) for seed in range(1, 4)]
    arguments = {"noise": noises.__getitem__, "diffusion_form": "linear", "last_step_size": h}
    x = sample_sde(flow, denoiser, z, num_steps=4, last_step=last_step, **arguments)

    # the same three steps, ending where the last one starts
    first, last = flow.sample_interval(diffusion_form="linear", last_step_size=h)
    assert last == 0.9
    before = z
    for step in range(3):
        t = torch.full((2,), first + step * (last - first) / 3, dtype=torch.float64)
        w, dt = float(1 - t[0]), (last - first) / 3
        drift = gaussian.optimal(path, "velocity")(before, t) + w * gaussian.optimal(path, "score")(before, t)
        before = before + dt * drift + (2 * w * dt) ** 0.5 * noises[step]
    t = torch.full((2,), last, dtype=torch.float64)
    velocity, score = (gaussian.optimal(path, name)(before, t) for name in ("velocity", "score"))
    expected = {
        "mean": before + h * (velocity + 0.1 * score),
        "euler": before + h * velocity,
    }
    torch.testing.assert_close(x, expected[last_step])


def test_what_the_authors_code_made_nan_or_refused() -> None:
    denoiser = gaussian.optimal("linear", "velocity")
    z, noise = normal(2, 1, 2, 2), torch.Generator().manual_seed(0)
    for form in ("sbdm", "constant", "increasing-decreasing"):
        x = sample_sde(Interpolant(), denoiser, z, noise=noise, diffusion_form=form, num_steps=10)
        assert x.isfinite().all()
    x = sample_sde(Interpolant(), denoiser, z, noise=noise, method="heun", num_steps=10, last_step=None)
    assert x.isfinite().all()


def test_one_evaluation_a_step_and_times_of_the_batch() -> None:
    calls: list[Tensor] = []

    def denoiser(x: Tensor, t: Tensor) -> Tensor:
        calls.append(t)
        return x

    z, noise = normal(3, 1, 2, 2), torch.Generator().manual_seed(0)
    sample_sde(Interpolant(), denoiser, z, noise=noise, diffusion_form="sigma", num_steps=25)
    assert len(calls) == 25
    times = torch.linspace(0, 0.96, 25, dtype=torch.float64)
    for t, time in zip(calls, times, strict=True):
        torch.testing.assert_close(t, time.expand(3))


def test_callback_and_generator() -> None:
    calls: list[tuple[int, int]] = []
    z = normal(2, 1, 2, 2)

    def run(seed: int, **arguments: object) -> Tensor:
        return sample_sde(
            Interpolant(),
            lambda x, t: x,
            z,
            noise=torch.Generator().manual_seed(seed),
            num_steps=5,
            **arguments,
        )

    x = run(0, callback=lambda *call: calls.append(call))
    assert calls == [(step, 5) for step in range(1, 6)]
    state = torch.get_rng_state()
    assert torch.equal(x, run(0))
    assert torch.equal(state, torch.get_rng_state())
    assert not torch.equal(x, run(1))
    calls.clear()
    run(0, last_step=None, callback=lambda *call: calls.append(call))
    assert calls == [(step, 5) for step in range(1, 6)]


def test_nothing_is_left_for_a_gradient() -> None:
    z = normal(1, 1, 2, 2).requires_grad_()
    assert not sample_sde(
        Interpolant(), lambda x, t: x, z, noise=torch.Generator(), num_steps=3
    ).requires_grad
    assert not sample_ode(Interpolant(), lambda x, t: x, z).requires_grad


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"method": "Euler"}, "unknown SDE method 'Euler'"),
        ({"diffusion_form": "SBDM"}, "unknown diffusion form 'SBDM'"),
        ({"last_step": "Mean"}, "unknown last step 'Mean'; choose from 'mean', 'euler', None"),
        ({"last_step_size": 0.0}, "last_step_size=0.0"),
        ({"diffusion_norm": -1.0}, "norm=-1.0"),
        ({"num_steps": 1}, "num_steps=1"),
        ({"num_steps": 0, "last_step": None}, "num_steps=0"),
        ({"noise": lambda step: torch.zeros(1)}, "noise\\(0\\) has shape"),
    ],
)
def test_bad_arguments_of_the_sde(arguments: dict[str, object], words: str) -> None:
    defaults = {"noise": torch.Generator()}
    with pytest.raises(ValueError, match=words):
        sample_sde(Interpolant(), lambda x, t: x, normal(2, 1, 2, 2), **{**defaults, **arguments})


def test_a_given_epsilon_of_zero_is_refused_where_it_is_singular() -> None:
    flow, z = Interpolant(sample_eps=0), normal(2, 1, 2, 2)
    run = partial(sample_sde, flow, lambda x, t: x, z, noise=torch.Generator(), num_steps=3)
    with pytest.raises(ValueError, match="'sbdm' is infinite at t = 0"):
        run()
    with pytest.raises(ValueError, match="needs the score at t = 1"):
        run(diffusion_form="sigma", method="heun", last_step=None)
    assert run(diffusion_form="sigma", last_step=None).isfinite().all()
    with pytest.raises(ValueError, match="would run from"):
        sample_sde(
            Interpolant(sample_eps=0.4), lambda x, t: x, z, noise=torch.Generator(), last_step_size=0.7
        )


def test_bad_starts() -> None:
    for x, words in (
        (normal(1, 1, 2, 2).half(), "got torch.float16"),
        (normal(1, 2, 2), "shape \\(1, 2, 2\\)"),
    ):
        with pytest.raises(ValueError, match=words):
            sample_ode(Interpolant(), lambda x, t: x, x)
        with pytest.raises(ValueError, match=words):
            sample_sde(Interpolant(), lambda x, t: x, x, noise=torch.Generator())


START = torch.tensor([1.0, -2.0], dtype=torch.float64)


def decay(t: Tensor, x: Tensor) -> Tensor:
    return -2 * t * x  # x(t) = x(0) exp(-t^2)


def ode_error(method: str, num_steps: int) -> float:
    end = solve_ode(decay, START, interval=(0.0, 1.5), method=method, num_steps=num_steps)
    return float((end - START * math.exp(-2.25)).abs().max())


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2)])
def test_order_of_the_equal_steps(method: str, order: int) -> None:
    assert ode_error(method, 80) / ode_error(method, 160) == pytest.approx(2**order, rel=0.06)


def test_one_step_of_each_method() -> None:
    x, h = 1.0, 0.5
    half = x + h / 2 * -2 * 0.5 * x  # starts at t = 0.5
    full = x + h * -2 * 0.5 * x
    expected = {
        "euler": full,
        "midpoint": x + h * -2 * 0.75 * half,
        "heun": x + h / 2 * (-2 * 0.5 * x + -2 * 1.0 * full),
    }
    for method, value in expected.items():
        end = solve_ode(decay, torch.tensor([x]), interval=(0.5, 1.0), method=method, num_steps=1)
        assert float(end) == pytest.approx(value)


def test_dopri5_meets_its_tolerance_either_way() -> None:
    end = solve_ode(decay, START, interval=(0.0, 1.5), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(end, START * math.exp(-2.25), rtol=1e-7, atol=0)
    back = solve_ode(decay, end, interval=(1.5, 0.0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(back, START, rtol=1e-6, atol=0)


def test_a_tuple_of_states() -> None:
    def derivative(t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return decay(t, state[0]), torch.ones(3, dtype=torch.float64)

    first, second = solve_ode(
        derivative,
        (START, torch.zeros(3, dtype=torch.float64)),
        interval=(0.0, 1.5),
        method="heun",
        num_steps=400,
    )
    torch.testing.assert_close(first, START * math.exp(-2.25), rtol=1e-4, atol=0)
    torch.testing.assert_close(second, torch.full((3,), 1.5, dtype=torch.float64))


@pytest.mark.parametrize("interval", [(0.0, 1.5), (1.5, 0.0)])
def test_callback_of_the_ode(interval: tuple[float, float]) -> None:
    calls: list[tuple[int, int]] = []
    solve_ode(
        decay,
        START,
        interval=interval,
        method="euler",
        num_steps=7,
        callback=lambda *call: calls.append(call),
    )
    assert calls == [(step, 7) for step in range(1, 8)]
    calls.clear()
    solve_ode(decay, START, interval=interval, rtol=1e-6, callback=lambda *call: calls.append(call))
    steps = [step for step, _ in calls]
    assert steps == sorted(set(steps))
    assert len(steps) > 3
    assert calls[-1] == (100, 100)


def test_bad_arguments_of_the_ode() -> None:
    for arguments, words in (
        ({"method": "rk45"}, "unknown ODE method 'rk45'"),
        ({"method": "euler", "num_steps": 0}, "num_steps=0"),
        ({"num_steps": 50}, "dopri5 is adaptive"),
    ):
        with pytest.raises(ValueError, match=words):
            solve_ode(decay, START, interval=(0.0, 1.0), **arguments)


def test_missing_torchdiffeq_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match="torchdiffeq is not installed; run: "):
        solve_ode(decay, START, interval=(0.0, 1.0))


def test_importing_generation_imports_no_extra() -> None:
    code = (
        "import sys, lineardiff.generation; sys.exit(bool({'torchdiffeq', 'diffusers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
