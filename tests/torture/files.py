"""Flip bits in the files of a run, cut them short, replace them; then evaluate, resume or sample it."""

import json
import random
import shutil
import time
from functools import partial
from pathlib import Path

from toy import fingerprint

from tests.torture.harness import Section, in_child
from tests.torture.runs import CLASSIFIER, GENERATOR, command, trained

JUNK = {
    "empty": b"",
    "null": b"null",
    "a list": b"[1, 2]",
    "a string": b'"32"',
    "another object": b'{"a": {"b": 1}}',
    "random bytes": bytes(random.Random(0).randrange(256) for _ in range(512)),
}


def run(section: Section, folder: Path, seconds: float, rng: random.Random) -> None:
    end = time.monotonic() + seconds
    finished = trained(folder / "classifier", CLASSIFIER)
    expected = fingerprint(finished)
    unfinished = _without_result(finished, folder / "unfinished")
    generative = trained(folder / "generative", GENERATOR)

    _junk_in_results(section, folder, finished, generative)
    while time.monotonic() < end:
        case = folder / "case"
        shutil.copytree(unfinished, case)
        file = rng.choice(sorted(p for p in (case / "checkpoints").rglob("*") if p.is_file()))
        what = f"{_damage(file, rng)} {file.relative_to(case)}"
        ending = in_child(lambda case=case: command(*CLASSIFIER, "--output", str(case)))
        if ending.code == 0:
            same = fingerprint(case) == expected
            said = file.parent.name in ending.stderr or file.name in ending.stderr
            outcome = "resumed from another checkpoint, same result" if said else "unnoticed, same result"
            section.record(outcome if same else "silently accepted", failed=not same, detail=what)
        else:
            section.must_be_refused(f"resume after {what}", ending)
        shutil.rmtree(case)


def _without_result(finished: Path, to: Path) -> Path:
    """Return a copy of a finished run as it was before its last update."""
    shutil.copytree(finished, to)
    shutil.rmtree(sorted((to / "checkpoints").iterdir())[-1])
    for name in ("model.safetensors", "config.json", "summary.json"):
        (to / name).unlink()
    extra = to / "checkpoints"  # two older checkpoints again, so that one may be damaged
    assert any(extra.iterdir())
    return to


def _damage(file: Path, rng: random.Random) -> str:
    data = bytearray(file.read_bytes())
    kind = rng.choice(("flip", "flip", "flip", "cut", "junk"))
    if kind == "flip":
        bit = rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        return f"bit {bit} flipped in"
    if kind == "cut":
        file.write_bytes(data[: rng.randrange(len(data))])
        return "truncated"
    name = rng.choice(sorted(JUNK))
    file.write_bytes(JUNK[name])
    return f"{name} in place of"


def _junk_in_results(section: Section, folder: Path, finished: Path, generative: Path) -> None:
    def attempt(original: Path, file: Path, data: bytes | None, what: str, words: list[str]) -> None:
        case = folder / "case"
        shutil.copytree(original, case)
        (case / file).unlink()
        if data is not None:
            (case / file).write_bytes(data)
        ending = in_child(partial(command, *(word.format(case) for word in words)))
        section.must_be_refused(f"{words[0]} with {what} as {file}", ending)
        assert "remove" not in ending.stderr or file.name in ending.stderr, ending.stderr
        shutil.rmtree(case)

    evaluate = ["evaluate", "{}", "--workers", "0"]
    sample = ["sample", "{}", "--output", str(folder / "samples"), "--num-images", "1", "--steps", "1"]
    resume = [*CLASSIFIER, "--output", "{}"]
    for name, data in JUNK.items():
        for file in ("config.json", "model.safetensors"):
            attempt(finished, Path(file), data, name, evaluate)
        attempt(finished, Path("recipe.json"), data, name, resume)
        transformer = Path("pipeline/transformer")
        for file in (transformer / "config.json", transformer / "diffusion_pytorch_model.safetensors"):
            attempt(generative, file, data, name, sample)
        attempt(generative, Path("pipeline/model_index.json"), data, name, sample)
    config = json.loads((finished / "config.json").read_text())
    for field in (
        "architecture",
        "model_args",
        "classes",
        "image_size",
        "mean",
        "std",
        "crop_pct",
        "interpolation",
    ):
        for value in (None, "x", -1, float("nan"), [], {}):
            changed = json.dumps({**config, field: value}).encode()
            attempt(finished, Path("config.json"), changed, f"{field}={value!r}", evaluate)
