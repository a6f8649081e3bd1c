"""Random configurations of the op: every backend that runs, outputs and gradients, against float64."""

import random
import time
from pathlib import Path
from typing import Any

import torch
import truth
from torch import Tensor

from lineardiff import visual_contrast_attention
from tests.torture.harness import Section, in_child

STAGES = ("differential", "differential", "plain", "halves")
BATCH = 25  # configurations of one child process


def run(section: Section, folder: Path, seconds: float, rng: random.Random) -> None:
    end, batch = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        file = folder / f"{batch}.pt"
        seed = rng.randrange(2**32)
        ending = in_child(lambda seed=seed, file=file: _batch(seed, file), deadline=300)
        if ending.code != 0:
            detail = f"seed {seed}: exit {ending.code}: {ending.stderr[-300:]}"
            section.record("crash" if ending.code is not None else "hang", failed=True, detail=detail)
        else:
            for wrong, detail in torch.load(file, weights_only=True):
                outcome = "wrong number" if wrong else "equal to float64"
                section.record(outcome, failed=wrong, detail=detail)
        batch += 1


def _batch(seed: int, file: Path) -> int:
    rng = random.Random(seed)
    torch.save([result for _ in range(BATCH) for result in _configuration(rng)], file)
    return 0


def _configuration(rng: random.Random) -> list[tuple[bool, str]]:
    B, heads, d = rng.randint(1, 3), rng.randint(1, 4), rng.choice((2, 4, 6, 8, 16, 30, 32, 64))
    h, w = rng.randint(1, 5), rng.randint(1, 5)
    H, W, prefix = rng.randint(h, 12), rng.randint(w, 12), rng.choice((0, 0, 1, 5))
    shape = (B, heads, prefix + H * W, d, h * w)
    options = {
        "softmax": rng.choice(("separate", "joint")),
        "global_contrast": rng.choice(STAGES),
        "patchwise": rng.choice(STAGES),
        "eps": rng.choice((1e-5, 1e-6, 1e-3)),
    }
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    scale = rng.choice((0.1, 1.0, 1.0, 10.0))
    tensors, scalars = truth.inputs(*shape, packed=rng.random() < 0.5, seed=rng.randrange(2**32), scale=scale)
    low = truth.cast(tensors, scalars, dtype)
    exact = ([x.double() for x in low[0]], {name: tuple(map(_double, v)) for name, v in low[1].items()})
    weight = torch.randn(shape[:4]).to(dtype).double()
    expected = _flat(truth.gradients(truth.vca, *exact, weight, **options))
    naive = _errors(_call(low, weight, "reference", options), expected)
    results = []
    for backend in ("reference", "portable", "cpu"):
        what = f"{backend} {shape} {dtype} scale={scale} {options}"
        try:
            errors = _errors(_call(low, weight, backend, options), expected)
        except ValueError as error:  # a backend may refuse an option, by name
            results.append((backend not in str(error), f"{what}: {error}"))
            continue
        # The error of naive low precision is the yardstick; float32 is held to 1e-5 besides.
        slack = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
        bounds = [2 * yardstick + slack for yardstick in naive]
        if any(error > bound for error, bound in zip(errors, bounds, strict=True)):
            # Where the norms amplify rounding, as with values below sqrt(eps), judge by what rounding the inputs does.
            moved = _sensitivity(exact, weight, options, expected, torch.finfo(dtype).eps)
            bounds = [bound + 4 * change for bound, change in zip(bounds, moved, strict=True)]
        worst = max(error - bound for error, bound in zip(errors, bounds, strict=True))
        results.append((not worst <= 0, f"{what}: error exceeds its bound by {worst:.2e}"))
    return results


def _sensitivity(
    exact: Any, weight: Tensor, options: dict[str, Any], expected: list[Tensor | None], eps: float
) -> list[float]:
    """Return how far each result moves in float64 when every input moves by up to one unit in the last place."""
    changes = []
    for _ in range(4):
        tensors = [x * (1 + eps * (2 * torch.rand_like(x) - 1)) for x in exact[0]]
        changes.append(
            _errors(_flat(truth.gradients(truth.vca, tensors, exact[1], weight, **options)), expected)
        )
    return [max(column) for column in zip(*changes, strict=True)]


def _call(
    low: tuple[list[Tensor], dict[str, Any]], weight: Tensor, backend: str, options: dict[str, Any]
) -> Any:
    def call(*tensors: Tensor, **rest: Any) -> Tensor:
        return visual_contrast_attention(*tensors, **rest, backend=backend)

    return _flat(truth.gradients(call, *low, weight, **options))


def _flat(result: Any) -> list[Tensor | None]:
    out, grads = result
    return [out, *grads]


def _errors(values: list[Tensor | None], expected: list[Tensor | None]) -> list[float]:
    """Largest error of each tensor relative to its largest true value, or to 1 where that is smaller."""
    return [
        (value.double() - true).abs().max().item() / max(true.abs().max().item(), 1)
        for value, true in zip(values, expected, strict=True)
        if value is not None and true is not None
    ]


def _double(x: Any) -> Any:
    return x.double() if torch.is_tensor(x) else x
