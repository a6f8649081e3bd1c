"""How a backend is chosen, and that nothing is chosen in silence against the caller's word."""

import importlib.util

import pytest
import torch
import truth

import lineardiff
from lineardiff.ops import Inputs, backends
from lineardiff.ops.backends import Backend


@pytest.fixture
def calls(monkeypatch):
    """Three backends that only record their name: the first two cannot run."""
    log = []

    def make(name, reason):
        return Backend(
            name, lambda inputs: log.append(name) or inputs.q, lambda inputs: reason, "for this test"
        )

    fakes = (
        make("fast", "no such chip"),
        make("faster", "d must be 64"),
        make("plain", None),
        make("slow", None),
    )
    monkeypatch.setattr(backends, "BACKENDS", fakes)
    monkeypatch.setattr(backends, "_chosen", "auto")
    return log


def run(**options):
    tensors, scalars = truth.inputs()
    return lineardiff.visual_contrast_attention(*tensors, **scalars, **options)


def test_auto_takes_the_first_that_can_run(calls):
    run()
    assert calls == ["plain"]


def test_argument_beats_context_beats_process(calls):
    lineardiff.set_backend("slow")
    run()
    with lineardiff.backend("plain"):
        run()
        run(backend="slow")
    run()
    assert calls == ["slow", "plain", "slow", "slow"]


def test_context_restores_after_an_error(calls):
    with pytest.raises(RuntimeError), lineardiff.backend("slow"):
        raise RuntimeError
    run()
    assert calls == ["plain"]


def test_named_backend_that_cannot_run_raises_its_reason(calls):
    with pytest.raises(ValueError, match="'fast' cannot run here: no such chip"):
        run(backend="fast")
    lineardiff.set_backend("faster")
    with pytest.raises(ValueError, match="d must be 64"):
        run()
    assert calls == []


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="'cpu', 'portable', 'reference'"):
        lineardiff.set_backend("quick")
    with pytest.raises(ValueError, match="LINEARDIFF_BACKEND"), lineardiff.backend("quick"):
        pass


@pytest.mark.parametrize(
    ("value", "expected"), [("reference", "reference"), ("", "portable"), ("nonsense", None)]
)
def test_environment_variable(value, expected, monkeypatch):
    tensors, scalars = truth.inputs()  # float64, which no compiled backend computes
    inputs = Inputs(*tensors, *scalars.values(), "separate", "differential", "differential", 1e-5)
    monkeypatch.setenv("LINEARDIFF_BACKEND", value)
    spec = importlib.util.find_spec("lineardiff.ops.backends")
    fresh = importlib.util.module_from_spec(spec)  # as in a new process, which reads the variable once
    spec.loader.exec_module(fresh)
    if expected is None:
        with pytest.raises(ValueError, match="unknown backend 'nonsense'.*LINEARDIFF_BACKEND"):
            fresh.select("auto", inputs)
    else:
        assert fresh.select("auto", inputs).name == expected


def test_real_backends_answer_without_inputs():
    assert [b.name for b in backends.BACKENDS] == ["cpu", "portable", "reference"]
    assert all(b.why_not(None) is None for b in backends.BACKENDS[1:])


def test_a_backend_of_this_device_that_is_passed_over_is_said_once(calls, monkeypatch, caplog):
    fast, faster, *others = backends.BACKENDS
    fast, faster = fast._replace(device="cpu"), faster._replace(device="cuda")
    monkeypatch.setattr(backends, "BACKENDS", (fast, faster, *others))
    backends._log.cache_clear()
    with caplog.at_level("WARNING", logger="lineardiff"):
        run()
        run()
    assert calls == ["plain", "plain"]
    assert [r.message for r in caplog.records] == [
        "backend 'fast' is passed over for a slower one: no such chip."
    ]


def test_compiled_function_follows_the_choice(monkeypatch):
    fakes = (
        Backend("double", lambda i: 2 * i.q, lambda i: None, ""),
        Backend("zero", lambda i: 0 * i.q, lambda i: None, ""),
    )
    monkeypatch.setattr(backends, "BACKENDS", fakes)
    torch._dynamo.reset()
    tensors, scalars = truth.inputs()
    compiled = torch.compile(lineardiff.visual_contrast_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, **scalars), 2 * tensors[0])
    with lineardiff.backend("zero"):
        assert not compiled(*tensors, **scalars).any()
    assert torch.equal(compiled(*tensors, **scalars), 2 * tensors[0])
