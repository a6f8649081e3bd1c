"""A generation run that is killed anywhere and rerun is the run that was not killed, bit for bit."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from kill import in_child, killed, run_module
from tiny_generation import TINY_SIT
from toy import fingerprint

import lineardiff.pipelines.pipeline  # noqa: F401  # seconds, that each forked process would take
from lineardiff.train import GenerationTask, train


def run(output: Path) -> None:
    train(GenerationTask(TINY_SIT), output=output)


def main(folder: Path) -> None:
    """Nothing here may use autograd before a fork."""
    assert in_child(lambda: run(folder / "whole")) == 0
    for change in (15, 25, 25, 20, 9):  # each kill is of the run that the previous one left
        assert killed(lambda: run(folder / "killed"), folder=folder, change=change)
    assert not (folder / "killed/summary.json").exists()
    assert in_child(lambda: run(folder / "killed")) == 0


def test_killed_and_resumed(tmp_path: Path) -> None:
    run_module(__file__, tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert fingerprint(killed) == fingerprint(whole)
    samples = {path.name: path.read_bytes() for path in (whole / "samples").iterdir()}
    assert samples.keys() == {"step-00000006.png", "step-00000012.png"}
    assert {path.name: path.read_bytes() for path in (killed / "samples").iterdir()} == samples
    weights = "pipeline/transformer/diffusion_pytorch_model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
