"""Every way out of a training ends within seconds, with one line and an exit code, and leaves no process behind."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kill import run_module
from PIL import Image

WORKERS = (0, 1, 4)
WAYS = {
    # way: exit code, words of its line
    "bad training image": (2, "train/a/7.png cannot be decoded"),
    "bad validation image": (2, "val/b/1.png cannot be decoded"),
    "diverged": (2, "the loss is nan"),
    "disk full": (2, "free some space"),
    "Ctrl-C": (130, "rerun the command to resume"),
    "SIGTERM": (130, "rerun the command to resume"),
    "Ctrl-C twice": (130, "lineardiff: interrupted"),
    "killed loader": (2, "loader process was killed"),
}
CASES = [(way, workers) for way in WAYS for workers in WORKERS if workers or way != "killed loader"]
FLAGS = (
    *("train", "demo", "--model", "vit_tiny_patch16_224"),
    *("--model-args", "img_size=16", "patch_size=8", "embed_dim=16", "depth=1", "num_heads=1"),
    *("--image-size", "16", "--batch-size", "8", "--epochs", "3", "--warmup-epochs", "1", "--log-every", "1"),
)


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each case ended; they are forked from one process, which imports the package once."""
    folder = tmp_path_factory.mktemp("ways")
    run_module(__file__, folder)
    return json.loads((folder / "endings.json").read_text())


@pytest.mark.parametrize(("way", "workers"), CASES, ids=str)
def test_one_line_and_an_exit_code(endings: dict[str, Any], way: str, workers: int) -> None:
    code, words = WAYS[way]
    ending = endings[f"{way}, {workers}"]
    assert ending["code"] == code, ending["stderr"]
    line = ending["stderr"].strip().splitlines()[-1]
    assert line.startswith("lineardiff: ")
    assert words in line
    assert "Traceback" not in ending["stderr"]
    assert ending["orphans"] == 0


@pytest.mark.parametrize("way", ["bad training image", "killed loader", "Ctrl-C"])
def test_under_torchrun(tmp_path: Path, way: str) -> None:
    images = write_images(tmp_path, way)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
            *(__file__, str(images), str(tmp_path / "run"), way),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if line.startswith("lineardiff: ")]
    code, words = WAYS[way]
    assert any(words in line for line in ours), done.stderr
    assert f"exitcode  : {code}" in done.stderr
    assert "Error: " not in done.stderr.replace("ChildFailedError:", ""), done.stderr


def write_images(folder: Path, way: str) -> Path:
    """40 training and 8 validation images of two classes."""
    root, rng = folder / f"images {way}", np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 4)):
        for name in "ab":
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    if way == "bad training image":
        (root / "train/a/7.png").write_bytes(b"no image")
    if way == "bad validation image":
        (root / "val/b/1.png").write_bytes(b"no image")
    return root


def train(images: Path, output: Path, way: str, workers: int) -> int:
    """Train on the images, with the accident."""
    from lineardiff.cli import main
    from lineardiff.data.images import ImageSplit
    from lineardiff.train import ClassificationTask

    flags = [*FLAGS, "--data", str(images), "--output", str(output), "--workers", str(workers)]
    if way == "diverged":
        flags += ["--learning-rate", "1e30", "--warmup-learning-rate", "1e30"]
    if way == "disk full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # a batch is smaller, a checkpoint larger
    if way in ("Ctrl-C", "Ctrl-C twice", "SIGTERM"):
        number = signal.SIGTERM if way == "SIGTERM" else signal.SIGINT
        times = 2 if way == "Ctrl-C twice" else 1
        ClassificationTask.loss = _interrupted(ClassificationTask.loss, number, times=times)  # type: ignore[method-assign]
    if way == "killed loader":
        parent, read = os.getpid(), ImageSplit.__getitem__

        def die(self: ImageSplit, index: int) -> Any:
            if os.getpid() != parent and index == 7 and self.split == "train":
                os.kill(os.getpid(), signal.SIGKILL)
            return read(self, index)

        ImageSplit.__getitem__ = die  # type: ignore[method-assign]
    return main(flags)


def _interrupted(method: Callable[..., Any], number: signal.Signals, *, times: int) -> Any:
    """Send the signal to the process group during the third call."""
    calls = 0

    def wrapped(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        for _ in range(times if calls == 3 else 0):
            os.killpg(0, number)
        return method(*arguments)

    return wrapped


def main(folder: Path) -> None:
    import lineardiff.cli.train
    import lineardiff.train  # noqa: F401
    from tests.torture.harness import in_child

    endings = {}
    for way, workers in CASES:
        images = folder / f"images {way}"
        if not images.exists():
            write_images(folder, way)
        output = folder / f"run {way} {workers}"
        ending = in_child(lambda i=images, o=output, w=way, n=workers: train(i, o, w, n), deadline=60)
        endings[f"{way}, {workers}"] = vars(ending)
    (folder / "endings.json").write_text(json.dumps(endings))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        # torchrun starts each process in a new session, so a signal to the group reaches its loaders too.
        raise SystemExit(train(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], workers=1))
