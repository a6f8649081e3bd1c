"""Reader of images in tables: Hugging Face datasets, from local parquet files or from the hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lineardiff.data.readers import SPLIT_NAMES, is_hidden
from lineardiff.extras import missing_extra

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict, Features

__all__ = ["TableImages", "holds_parquet"]

# Decide between several columns of the right type.
_IMAGE_NAMES = ("image", "img")
_LABEL_NAMES = ("label", "labels", "fine_label")


def holds_parquet(folder: Path) -> bool:
    """Return whether a folder has the Hugging Face layout: parquet files in it or in its `data/`."""
    return any(
        not is_hidden(file.name) for inside in (folder, folder / "data") for file in inside.glob("*.parquet")
    )


class TableImages:
    """The rows of one split of a Hugging Face dataset.

    Args:
        source: Name on the hub, or the path of `folder`, as the user gave it.
        split: "train", or "validation" for the first name of SPLIT_NAMES that exists.
        folder: Local folder of parquet files; None asks the hub.

    Raises:
        ValueError: The dataset cannot be loaded, has no such split, no single column of images or of labels, or rows
            without a label.
        ImportError: The package datasets is not installed.
    """

    def __init__(self, source: str | Path, split: str, *, folder: Path | None = None) -> None:
        try:
            import datasets
        except ImportError as error:
            raise missing_extra("train", package="datasets") from error
        tables = _load_hub(str(source)) if folder is None else _load_folder(folder)
        name = next((name for name in SPLIT_NAMES[split] if name in tables), None)
        if name is None:
            raise ValueError(
                f"The data source {source} has no {split} split: expected {' or '.join(SPLIT_NAMES[split])}, "
                f"found {', '.join(tables)}."
            )
        self._where = f"split {name} of {source}"
        table = tables[name]
        self._image = _image_column(table.features, where=self._where)
        label = _label_column(table.features, where=self._where)
        self.classes, self.labels = _read_labels(table, label, where=self._where)
        # Undecoded, so that an image that cannot be decoded is named by its row.
        self._rows = table.select_columns(self._image).cast_column(self._image, datasets.Image(decode=False))

    def read(self, index: int) -> bytes:
        cell = self._rows[index][self._image]
        if cell is None:
            raise ValueError("the cell is empty")
        return cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()

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
                    f"The parquet file {path} is damaged ({_reason(error)}); download or write it again."
                ) from error
        raise ValueError(
            f"The parquet folder {folder} cannot be loaded ({_reason(error)}); expected train-*.parquet and "
            "test-*.parquet with the same columns, and room for a copy in the cache of datasets, "
            f"{datasets.config.HF_DATASETS_CACHE}."
        ) from error


def _load_hub(name: str) -> "DatasetDict":
    import datasets

    try:
        with _offline_unless_reachable(name), _quiet():
            return datasets.load_dataset(name)
    except Exception as error:
        raise ValueError(
            f"The data source {name} is not a folder here, and the Hugging Face hub has no dataset of that name that "
            f"can be read ({_reason(error)}). For a folder, correct the path; for the hub, check the name, the network "
            "and, if access is restricted, your token."
        ) from error


@contextmanager
def _offline_unless_reachable(name: str) -> Iterator[None]:
    """Ask the hub for a dataset once; without a connection use the cache only, which `datasets` retries for minutes.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: The hub refuses: there is no such dataset, or no access to it.
    """
    import datasets
    import huggingface_hub

    flags = [(datasets.config, "HF_HUB_OFFLINE"), (huggingface_hub.constants, "HF_HUB_OFFLINE")]
    before = [getattr(module, flag) for module, flag in flags]
    try:
        huggingface_hub.HfApi().dataset_info(name, timeout=10)
    except huggingface_hub.errors.HfHubHTTPError:
        raise
    except Exception:  # no connection: the class is that of whichever HTTP client the hub's package uses
        for module, flag in flags:
            setattr(module, flag, True)
    try:
        yield
    finally:
        for (module, flag), value in zip(flags, before, strict=True):
            setattr(module, flag, value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars of `datasets` and its logging of errors that it also raises."""
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
    """Return the first line of the original exception, which `datasets` wraps in less informative ones."""
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
        f"{where} has {problem}; expected one, named {' or '.join(names)}. Its columns: {columns}."
    )


def _read_labels(table: "Dataset", column: str, *, where: str) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the class names and the index into them of every row."""
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
            "expected a class in every row."
        )
    if isinstance(feature, datasets.ClassLabel):
        return classes, np.array(values)
    distinct, labels = np.unique(values, return_inverse=True)
    return tuple(str(value) for value in distinct), labels
