"""A generation run that is killed anywhere and repeated is the run that was not killed, bit for bit."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from tiny_generation import TINY_SIT
from toy import fingerprint

import lineardiff.pipelines.pipeline  # noqa: F401  # seconds, that each forked process would take
from lineardiff.runs import checkpoint
from lineardiff.train import GenerationTask, train
from tests.train.test_resume import in_child


def run(output: Path, *, dies_at: int | None = None) -> None:
    """Trains; with `dies_at` dies in the middle of that file among those it writes whole."""
    whole, written = checkpoint._write, 0

    def half(path: Path, data: bytes) -> None:
        nonlocal written
        written += 1
        if written == dies_at:
            path.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        whole(path, data)

    checkpoint._write = half
    train(TINY_SIT, GenerationTask(TINY_SIT), output=output)


def main(folder: Path) -> None:
    """Runs, killed and not, left in `folder`. Forks, so nothing here may use autograd before."""
    assert in_child(partial(run, folder / "whole")) == 0
    # In the second checkpoint; then, from the first one on, in the last grid; then after the pipeline was written.
    for dies_at in (6, 8, 9):
        assert in_child(partial(run, folder / "killed", dies_at=dies_at)) == -signal.SIGKILL
    assert (folder / "killed/pipeline").is_dir()
    assert not (folder / "killed/summary.json").exists()
    assert in_child(partial(run, folder / "killed")) == 0


def test_killed_and_repeated(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert fingerprint(killed) == fingerprint(whole)
    samples = {path.name: path.read_bytes() for path in (whole / "samples").iterdir()}
    assert samples.keys() == {"step-00000006.png", "step-00000012.png"}
    assert {path.name: path.read_bytes() for path in (killed / "samples").iterdir()} == samples
    weights = "pipeline/transformer/diffusion_pytorch_model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
