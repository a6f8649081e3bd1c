"""Small runs that the sections damage, kill and resume."""

from collections.abc import Sequence
from pathlib import Path

CLASSIFIER = (
    *("train", "demo", "--model", "vca_deit_tiny_patch16_224"),
    *(
        "--model-args",
        "img_size=16",
        "patch_size=4",
        "embed_dim=32",
        "depth=1",
        "num_heads=1",
        "contrast_grid=(2,2)",
    ),
    *("--image-size", "16", "--train-limit", "64", "--validation-limit", "32", "--batch-size", "16"),
    *(
        "--epochs",
        "3",
        "--warmup-epochs",
        "1",
        "--log-every",
        "2",
        "--checkpoint-every",
        "2",
        "--workers",
        "0",
    ),
)
GENERATOR = (
    *("train", "fashion_sit", "--model-args", "dim=32", "depth=1", "num_heads=2", "patch_size=7"),
    *("--train-limit", "32", "--validation-limit", "8", "--batch-size", "16", "--accumulate", "1"),
    *("--epochs", "1", "--warmup-epochs", "0", "--grid-images", "4", "--grid-steps", "2", "--log-every", "1"),
    *("--checkpoint-every", "1", "--workers", "0"),
)


def command(*words: str) -> int:
    """Run a command line in this process and return its exit code."""
    from lineardiff.cli import main

    return main(words)


def trained(folder: Path, words: Sequence[str]) -> Path:
    """Train a small run in a child process, because forking after autograd has run hangs."""
    from tests.torture.harness import in_child

    ending = in_child(lambda: command(*words, "--output", str(folder)), deadline=300)
    if ending.code != 0:
        raise RuntimeError(f"the run that is to be tortured failed: {ending.stderr}")
    return folder
