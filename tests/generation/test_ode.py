import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from lineardiff.generation import solve_ode

pytest.importorskip("torchdiffeq")

START = torch.tensor([1.0, -2.0], dtype=torch.float64)


def decay(t: Tensor, x: Tensor) -> Tensor:
    return -2 * t * x  # x(t) = x(0) exp(-t^2)


def error(method: str, num_steps: int) -> float:
    end = solve_ode(decay, START, interval=(0.0, 1.5), method=method, num_steps=num_steps)
    return float((end - START * math.exp(-2.25)).abs().max())


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2)])
def test_order_of_the_equal_steps(method: str, order: int) -> None:
    assert error(method, 80) / error(method, 160) == pytest.approx(2**order, rel=0.06)


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
def test_callback(interval: tuple[float, float]) -> None:
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


def test_bad_arguments() -> None:
    for arguments, words in (
        ({"method": "rk45"}, "unknown ODE method 'rk45'"),
        ({"method": "euler", "num_steps": 0}, "num_steps=0"),
        ({"num_steps": 50}, "dopri5 chooses its steps"),
    ):
        with pytest.raises(ValueError, match=words):
            solve_ode(decay, START, interval=(0.0, 1.0), **arguments)


def test_missing_torchdiffeq_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r"pip install 'lineardiff\[generate\]'"):
        solve_ode(decay, START, interval=(0.0, 1.0))


def test_importing_generation_imports_no_extra() -> None:
    code = (
        "import sys, lineardiff.generation; sys.exit(bool({'torchdiffeq', 'diffusers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
