"""Draw the balanced Fashion-MNIST subset that ships inside lineardiff.

Reads the four original files (Debian: `apt install dataset-fashion-mnist`) and writes one compressed .npz of
the uint8 arrays `train_images` (10000, 28, 28), `train_labels` (10000,), `validation_images` (2000, 28, 28)
and `validation_labels` (2000,):

    python tools/make_fashion_subset.py --output src/lineardiff/data/fashion/fashion.npz
"""

import argparse
import gzip
import hashlib
from pathlib import Path

import numpy as np

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
SEED = 0
PER_CLASS = {"train": ("train", 1000), "validation": ("t10k", 200)}


def read_idx(path: Path) -> np.ndarray:
    """The uint8 array of a gzipped IDX file: bytes 0 0 8 ndim, then ndim big-endian sizes, then the data."""
    content = gzip.decompress(path.read_bytes())
    if content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an IDX file of unsigned bytes: it starts with {content[:4]!r}")
    ndim = content[3]
    shape = np.frombuffer(content, ">u4", count=ndim, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def draw_subset(folder: Path) -> dict[str, np.ndarray]:
    """Draw PER_CLASS images of every class without replacement, kept in the order of the original files."""
    rng = np.random.default_rng(SEED)
    arrays = {}
    for split, (name, count) in PER_CLASS.items():
        images = read_idx(folder / f"{name}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{name}-labels-idx1-ubyte.gz")
        drawn = [rng.choice(np.flatnonzero(labels == label), count, replace=False) for label in range(10)]
        chosen = np.sort(np.concatenate(drawn))
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = images[chosen], labels[chosen]
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, default=DEBIAN, help="folder of the four *-ubyte.gz files")
    parser.add_argument("--output", type=Path, required=True, help="the .npz file to write")
    arguments = parser.parse_args()
    np.savez_compressed(arguments.output, **draw_subset(arguments.source))
    content = arguments.output.read_bytes()
    print(f"{arguments.output}: {len(content)} bytes, sha256 {hashlib.sha256(content).hexdigest()}")


if __name__ == "__main__":
    main()
