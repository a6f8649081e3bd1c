"""How a backend is chosen, and that nothing is chosen in silence against the caller's word."""

import asyncio
import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading

import pytest
import torch
import torch.utils.checkpoint
import truth

import lineardiff
from lineardiff.ops import add_value_conv, backends, cpu
from lineardiff.ops.backends import Backend


@pytest.fixture
def calls(monkeypatch):
    """Three backends that only record their name: the first two cannot run."""
    log = []

    def make(name, reason):
        def run(inputs):
            log.append(name)
            return inputs[0]

        return Backend(name, run, run, lambda inputs: reason, "for this test")

    fakes = (
        make("fast", "no such chip"),
        make("faster", "d must be 64"),
        make("plain", None),
        make("slow", None),
    )
    monkeypatch.setattr(backends, "BACKENDS", fakes)
    monkeypatch.setattr(backends, "_process", None)
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


@pytest.mark.parametrize(("value", "expected"), [("slow", "slow"), ("auto", "plain")])
def test_environment_variable_is_the_last_resort(value, expected, calls, monkeypatch):
    monkeypatch.setattr(backends, "_environment", value)
    run()
    with lineardiff.backend("slow"):
        run()
    lineardiff.set_backend("plain")
    run()
    assert calls == [expected, "slow", "plain"]


@pytest.mark.parametrize(("value", "expected"), [("reference", "reference"), ("", "auto")])
def test_environment_variable_is_read(value, expected):
    code = "from lineardiff.ops import backends; print(backends._environment)"
    environment = os.environ | {"LINEARDIFF_BACKEND": value}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr


def test_unknown_environment_variable_is_reported_before_anything_else(monkeypatch):
    monkeypatch.setattr(backends, "_environment", "quick")
    (q, *rest), scalars = truth.inputs()
    with pytest.raises(
        ValueError, match=r"LINEARDIFF_BACKEND='quick'.*'auto', 'cpu', 'portable', 'reference'"
    ):
        lineardiff.visual_contrast_attention(q[0], *rest, **scalars, backend="reference")


def in_thread(function):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_context_belongs_to_its_thread_and_set_backend_to_the_process(calls):
    with lineardiff.backend("slow"):
        in_thread(run)
        run()
    lineardiff.set_backend("slow")
    in_thread(run)
    assert calls == ["plain", "slow", "slow"]


def test_threads_that_leave_in_another_order_leave_no_choice_behind(calls):
    inside, leave = threading.Event(), threading.Event()

    def other():
        with lineardiff.backend("slow"):
            inside.set()
            assert leave.wait(10)
        run()

    thread = threading.Thread(target=other)
    with lineardiff.backend("plain"):
        thread.start()
        assert inside.wait(10)
    leave.set()
    thread.join()
    run()
    assert calls == ["plain", "plain"]


def test_context_belongs_to_its_asyncio_task(calls):
    async def main():
        entered = asyncio.Event()

        async def choose():
            with lineardiff.backend("slow"):
                entered.set()
                await asyncio.sleep(0)
                run()

        task = asyncio.create_task(choose())
        await entered.wait()
        run()
        await task

    asyncio.run(main())
    assert calls == ["plain", "slow"]


@pytest.mark.parametrize("backward_on", ["reference", "portable", None])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_calls_are_recomputed_on_their_backends(use_reentrant, nested, backward_on, monkeypatch):
    called = []

    def spy(backend):
        def run(inputs):
            called.append((int(inputs.eps * 10), backend.name))
            return backend.run(inputs)

        return backend._replace(run=run)

    monkeypatch.setattr(backends, "BACKENDS", tuple(map(spy, backends.BACKENDS)))
    monkeypatch.setattr(backends, "_process", "portable")
    tensors, scalars = truth.inputs()
    leaves = [x.clone().requires_grad_() for x in tensors]

    def checkpointed(function):
        return lambda *x: torch.utils.checkpoint.checkpoint(function, *x, use_reentrant=use_reentrant)

    def attend(number):
        return lambda *x: 2 * lineardiff.visual_contrast_attention(*x, **scalars, eps=number / 10)

    def inner(*x):
        out = attend(3)(*x)
        with lineardiff.backend("reference"):
            return out + attend(4)(*x)

    wrap = checkpointed if nested else lambda function: function
    with lineardiff.backend("reference"):
        out = checkpointed(wrap(attend(1)))(*leaves)
    out = out + checkpointed(wrap(attend(2)))(*leaves) + checkpointed(wrap(inner))(*leaves)
    forward = {(1, "reference"), (2, "portable"), (3, "portable"), (4, "reference")}
    assert set(called) == forward
    count = len(called)
    with contextlib.nullcontext() if backward_on is None else lineardiff.backend(backward_on):
        out.sum().backward()
    assert set(called[count:]) == forward
    expected = sum(attend(number)(*leaves) for number in (1, 2, 3, 4))
    for leaf, grad in zip(leaves, torch.autograd.grad(expected.sum(), leaves), strict=True):
        torch.testing.assert_close(leaf.grad, grad)


def test_backends_are_listed():
    listed = lineardiff.list_backends()
    assert [b.name for b in listed] == ["cpu", "portable", "reference"]
    assert [b.reason for b in listed[1:]] == [None, None]
    assert listed[0].reason == cpu.why_not(None)


def test_the_convolution_is_chosen_like_the_attention(calls):
    o, v = torch.zeros(2, 1, 1, 6, 4).unbind()
    arguments = (o, v, torch.zeros(4, 1, 3, 3), torch.zeros(4))

    def run():
        add_value_conv(*arguments, feat_size=(2, 3), overwrite=False)

    run()
    with lineardiff.backend("slow"):
        run()
    with lineardiff.backend("fast"), pytest.raises(ValueError, match="'fast' cannot run here: no such chip"):
        run()
    assert calls == ["plain", "slow"]


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
        Backend("double", lambda i: 2 * i.q, None, lambda i: None, ""),
        Backend("zero", lambda i: 0 * i.q, None, lambda i: None, ""),
    )
    monkeypatch.setattr(backends, "BACKENDS", fakes)
    torch._dynamo.reset()
    tensors, scalars = truth.inputs()
    compiled = torch.compile(lineardiff.visual_contrast_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors, **scalars), 2 * tensors[0])
    with lineardiff.backend("zero"):
        assert not compiled(*tensors, **scalars).any()
    assert torch.equal(compiled(*tensors, **scalars), 2 * tensors[0])
