"""Stochastic interpolants give the numbers of SiT's authors' code, on every path."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from recorded import normal, read
from torch import Tensor

from lineardiff.generation import FlowPath, Interpolant, sample_ode, sample_sde

pytest.importorskip("torchdiffeq")

SHAPE = (2, 4, 8, 8)
FORMS = {
    "SBDM": "sbdm",
    "constant": "constant",
    "decreasing": "decreasing",
    "linear": "linear",
    "sigma": "sigma",
}
# the authors' heun20 was recorded with torchdiffeq's "midpoint"; they count the points, we the steps between
ODES = {"euler20": ("euler", 19), "heun20": ("midpoint", 19), "dopri5": ("dopri5", None)}
WEIGHTINGS = {
    "velocity": ["none"],
    "score": ["none", "velocity", "likelihood"],
    "noise": ["none", "velocity", "likelihood"],
}


def toy(x: Tensor, t: Tensor) -> Tensor:
    return 0.3 * x + 0.1 * torch.sin(3 * t).reshape(-1, 1, 1, 1)


def values_of(path: FlowPath) -> dict[str, Tensor]:
    x0, x1 = normal("x0", 5, 4, 8, 8), 0.8 * normal("x1", 5, 4, 8, 8)
    t = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    z = normal("z", *SHAPE)
    flow = Interpolant(path=path)
    values = {"xt": flow.mix(x1, t, x0), "ut": flow.target_velocity(x1, t, x0)}
    values |= {f"diffusion.{name}": flow.diffusion(t, form) for name, form in FORMS.items()}
    for prediction, weightings in WEIGHTINGS.items():
        for weighting in weightings:
            flow = Interpolant(path=path, prediction=prediction, weighting=weighting)
            values[f"loss.{prediction}.{weighting}"] = flow.training_losses(toy, x1, t, x0)["loss"]
        values[f"drift.{prediction}"] = flow.velocity(toy(x1, t), x1, t)
        values[f"score.{prediction}"] = flow.score(toy(x1, t), x1, t)
        for name, (method, num_steps) in ODES.items():
            values[f"ode_{name}.{prediction}"] = sample_ode(flow, toy, z, method=method, num_steps=num_steps)
        for last_step in ("mean", "euler"):
            values[f"sde_Euler_{last_step.title()}.{prediction}"] = sample_sde(
                flow,
                toy,
                z,
                noise=lambda i: normal(f"step{i}", *SHAPE),
                diffusion_form="sbdm" if path == "vp" else "sigma",
                num_steps=25,
                last_step=last_step,
            )
    return values


class Rounded(Interpolant):
    """In float64, with one float32 rounding of the time and one of the velocity at each evaluation."""

    def seed(self, seed: int) -> "Rounded":
        self.generator = torch.Generator().manual_seed(seed)
        return self

    def _rounding(self, *shape: int) -> Tensor:
        uniform = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        return 1 + (2 * uniform - 1) * 2.0**-24

    def velocity(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return super().velocity(output, x, t * self._rounding(1)) * self._rounding(*x.shape)


def singular_tolerance() -> tuple[Tensor, float]:
    """The VP path's dopri5 sample of a noise prediction in float64, and how far float32 may be from it.

    dopri5 tries steps past the singular end, where it amplifies rounding a hundredfold, and differently on each CPU.
    The bound is sixteen times the largest of eight random effects of one rounding at each evaluation: a float32
    evaluation rounds about that often.
    """
    z = normal("z", *SHAPE).double()
    exact = sample_ode(Interpolant(path="vp", prediction="noise"), toy, z)
    moved = [sample_ode(Rounded(path="vp", prediction="noise").seed(seed), toy, z) for seed in range(8)]
    return exact, 16 * max(float((x - exact).abs().max()) for x in moved)


@pytest.mark.parametrize("path", get_args(FlowPath))
def test_every_value(path: FlowPath, parity_data: Path) -> None:
    recorded = read(parity_data / f"sit_transport_{path}.safetensors").tensors
    ours = values_of(path)
    assert set(ours) == set(recorded)
    if path == "vp":
        exact, tolerance = singular_tolerance()
        largest = float(exact.abs().max())
        assert 1e-5 * largest < tolerance < 1e-3 * largest
        values = recorded.pop("ode_dopri5.noise")
        for found in (exact, ours["ode_dopri5.noise"].double()):
            torch.testing.assert_close(found, values.double(), rtol=0, atol=tolerance)
    for name, values in recorded.items():
        torch.testing.assert_close(
            ours[name],
            values.expand_as(ours[name]),
            rtol=1e-4,
            atol=1e-6 * float(values.abs().max()),
            msg=lambda m, n=name: f"{n}: {m}",
        )
