"""Folders that are filled piece by piece: each file whole or absent, all of one experiment."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A path to write to, renamed to `path` at the end of the block, or removed when the block fails.

    So `path` is complete if it exists, wherever the process was killed.
    """
    unfinished = path.with_name(f"{path.stem}.unfinished{path.suffix}")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def check_settings(folder: Path, settings: Mapping[str, Any], *, pieces: str) -> bool:
    """Whether `folder/settings.json` is there, and says the same.

    Args:
        folder: need not exist.
        settings: JSON-able.
        pieces: a pattern of the files that depend on the settings; what a folder without them says is void.

    Raises:
        ValueError: it says something else, is damaged, or `folder` is a file; the message names the settings.
    """
    file = folder / "settings.json"
    if folder.is_file():
        raise ValueError(f"{folder} is a file; expected a folder, new or of the same settings")
    if next(folder.glob(pieces), None) is None:
        return False
    if not file.exists():
        raise ValueError(
            f"{folder} holds {pieces} of unknown settings: choose another folder, or empty this one"
        )
    try:
        before = dict(json.loads(file.read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged ({error}): choose another folder, or empty this one") from error
    now = json.loads(json.dumps(dict(settings)))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if names:
        told = "; ".join(f"{name} was {before.get(name)!r} and is now {now.get(name)!r}" for name in names)
        raise ValueError(
            f"{folder} was begun with other settings: {told}. Give the old ones, or choose another folder"
        )
    return True


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Makes the folder and writes `settings.json`, for :func:`check_settings`."""
    folder.mkdir(parents=True, exist_ok=True)
    with written_whole(folder / "settings.json") as file:
        file.write_text(json.dumps(dict(settings), indent=2) + "\n")
