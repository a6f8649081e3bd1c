"""Reader of images in tables: Hugging Face datasets, from local parquet files or from the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from lineardiff.data.readers import SPLIT_NAMES

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features

# What decides between several columns of the right type.
_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels", "fine_label")


def holds_parquet(folder: Path) -> bool:
    """Say whether a folder has the Hugging Face layout: parquet files in it or in its `data/`."""
    return any(folder.glob("*.parquet")) or any(folder.glob("data/*.parquet"))


class TableImages:
    """The rows of one split of a Hugging Face dataset.

    Args:
        source: as the user gave it: a name on the hub, or the path of `folder`.
        split: "train", or "validation" for the first name of SPLIT_NAMES that exists.
        folder: the local folder of parquet files; None asks the hub.

    Raises:
        ValueError: `datasets` is not installed, the dataset cannot be loaded, has no such split, no single
            column of images or of labels, or rows without a label.
    """

    def __init__(self, source: str | Path, split: str, *, folder: Path | None = None) -> None:
        try:
            import datasets
        except ImportError as error:
            raise ValueError(
                f'the data source {source} is read by the package datasets: pip install "lineardiff[train]"'
            ) from error
        tables = _load_hub(str(source)) if folder is None else _load_folder(folder)
        name = next((name for name in SPLIT_NAMES[split] if name in tables), None)
        if name is None:
            raise ValueError(
                f"the data source {source} has no {split} split: expected {' or '.join(SPLIT_NAMES[split])}, "
                f"found {', '.join(tables)}"
            )
        self._where = f"split {name} of {source}"
        table = tables[name]
        self._image = _image_column(table.features, where=self._where)
        label = _label_column(table.features, where=self._where)
        self.classes, self.labels = _read_labels(table, label, where=self._where)
        # Bytes, not pictures: an image that cannot be decoded is to be named by its row.
        self._rows = table.select_columns(self._image).cast_column(self._image, datasets.Image(decode=False))

    def read(self, index: int) -> Image.Image:
        cell = self._rows[index][self._image]
        if cell is None:
            raise ValueError("the cell is empty")
        return Image.open(BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"])

    def locate(self, index: int) -> str:
        return f"row {index} (column {self._image}) in {self._where}"


def _load_folder(folder: Path) -> "DatasetDict":
    import datasets

    try:
        with _quiet():
            return datasets.load_dataset(str(folder.resolve()))
    except Exception as error:
        for path in sorted(folder.rglob("*.parquet")):
            if not _readable(path):
                raise ValueError(
                    f"the parquet file {path} is damaged ({_reason(error)}); download or write it again"
                ) from error
        raise ValueError(
            f"the parquet folder {folder} cannot be loaded ({_reason(error)}); expected train-*.parquet and "
            "test-*.parquet with the same columns, and room for a copy in the cache of datasets, "
            f"{datasets.config.HF_DATASETS_CACHE}"
        ) from error


def _load_hub(name: str) -> "DatasetDict":
    import datasets

    try:
        return datasets.load_dataset(name)
    except Exception as error:
        raise ValueError(
            f"the data source {name} is no folder here, and the Hugging Face hub gives no dataset of that "
            f"name ({_reason(error)}). If you mean a folder, mend the path; if you mean the hub, check the "
            "name and the network"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep `datasets` from drawing progress bars and logging errors that are raised anyway."""
    import datasets

    bars, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()


def _readable(path: Path) -> bool:
    import pyarrow.parquet

    try:
        pyarrow.parquet.ParquetFile(path)
    except Exception:
        return False
    return True


def _reason(error: BaseException) -> str:
    """The first line of the exception that started it, which `datasets` wraps in others that say less."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).splitlines()[0]}" if str(error) else type(error).__name__


def _image_column(features: "Features", *, where: str) -> str:
    import datasets

    found = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    # A parquet file that was not written by `datasets` says only that the column holds bytes.
    found = found or [name for name in _IMAGE_NAMES if name in features and _holds_bytes(features[name])]
    return _only_column(found, _IMAGE_NAMES, features, what="images (datasets.Image)", where=where)


def _holds_bytes(kind: Any) -> bool:
    return "bytes" in kind if isinstance(kind, dict) else getattr(kind, "dtype", None) == "binary"


def _label_column(features: "Features", *, where: str) -> str:
    import datasets

    found = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    found = found or [name for name in _LABEL_NAMES if name in features]
    return _only_column(found, _LABEL_NAMES, features, what="labels (datasets.ClassLabel)", where=where)


def _only_column(
    found: list[str], names: tuple[str, ...], features: "Features", *, what: str, where: str
) -> str:
    if len(found) > 1:
        found = [name for name in found if name in names] or found
    if len(found) == 1:
        return found[0]
    columns = ", ".join(f"{name} ({type(kind).__name__})" for name, kind in features.items())
    problem = f"several columns of {what}: {', '.join(found)}" if found else f"no column of {what}"
    raise ValueError(
        f"{where} has {problem}; expected one, named {' or '.join(names)}. Its columns: {columns}"
    )


def _read_labels(table: "Dataset", column: str, *, where: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the class names and every row's index into them."""
    import datasets

    values: list[Any] = table[column][:]
    feature = table.features[column]
    if isinstance(feature, datasets.ClassLabel):
        classes = tuple(feature.names)
        missing = [row for row, value in enumerate(values) if value is None or not 0 <= value < len(classes)]
    else:
        missing = [row for row, value in enumerate(values) if not isinstance(value, int | str)]
    if missing:
        raise ValueError(
            f"{where}: row {missing[0]} has the label {values[missing[0]]!r} in column {column}; "
            "expected a class in every row"
        )
    if isinstance(feature, datasets.ClassLabel):
        return classes, np.array(values)
    distinct, labels = np.unique(values, return_inverse=True)
    return tuple(str(value) for value in distinct), labels
