"""Resumable work of several processes that fill a folder with numbered files."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lineardiff.device import join_processes
from lineardiff.files import write_atomically

__all__ = ["Job"]

SETTINGS = "settings.json"


class Job:
    """Files numbered from 0 in one folder, shared between processes; a rerun writes the missing ones.

    Creating the job joins the processes started by torchrun and writes `settings.json`. A folder that holds files
    written with other settings is refused before anything is written.

    Args:
        folder: Output folder; created if it does not exist.
        name: %-pattern of the file names, such as "shard-%05d.safetensors".
        count: Number of files.
        settings: Everything that the files depend on, JSON-serialisable.
        device: For example "cpu" or "cuda:0"; by default the accelerator assigned to this process, if any.

    Attributes:
        device: The device of this process.
        is_main: Whether this is the main process, which completes the work after :meth:`run`.

    Raises:
        ValueError: The folder holds files of other settings, its settings.json is damaged, it is a file, or the
            device is not available.
    """

    def __init__(
        self, folder: Path, *, name: str, count: int, settings: Mapping[str, Any], device: str | None = None
    ) -> None:
        self.folder = folder
        self._name, self._count = name, count
        self._check_settings(settings)
        self._state, self.device = join_processes(device)
        self.is_main: bool = self._state.is_main_process
        if self.is_main:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / SETTINGS, json.dumps(dict(settings), indent=2) + "\n")
        self._state.wait_for_everyone()

    def run(
        self,
        work: Callable[[list[int], Callable[[int], None]], None],
        *,
        verb: str,
        unit: str = "image",
        size: Callable[[int], int] = lambda index: 1,
    ) -> None:
        """Write the missing files of this process, then wait for the other processes.

        A file counts as written once it exists, so `work` must write atomically.

        Args:
            work: Called with the indices of the missing files and with a function to call with the number of units
                done since its last call.
            verb: What the progress bar says is being done, such as "sampling".
            unit: What the progress bar counts; its rate is that of the work done by this run.
            size: Number of units in file i.

        Raises:
            KeyboardInterrupt: The user interrupted the work; the message says how to resume.
        """
        from tqdm import tqdm

        world_size = self._state.num_processes
        mine = range(self._state.process_index, self._count, world_size)
        missing = [index for index in mine if not (self.folder / (self._name % index)).exists()]
        total = sum(map(size, mine))
        with tqdm(
            total=total,
            initial=total - sum(map(size, missing)),
            unit=unit,
            desc=verb if world_size == 1 else f"{verb} (1 of {world_size} processes)",
            disable=not self.is_main,
        ) as bar:
            try:
                work(missing, bar.update)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"rerun the command to resume in {self.folder}") from None
        self._state.wait_for_everyone()

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        if self.folder.is_file():
            raise ValueError(f"{self.folder} is a file; expected a folder.")
        pieces = re.sub(r"%0\d+d", "[0-9]*[0-9]", self._name)
        if next(self.folder.glob(pieces), None) is None:
            return
        file = self.folder / SETTINGS
        if not file.exists():
            raise ValueError(f"{self.folder} holds {pieces} but no {SETTINGS}; choose another folder.")
        try:
            before = dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}); choose another folder.") from error
        now = json.loads(json.dumps(dict(settings)))
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if names:
            changes = "; ".join(
                f"{name} was {before.get(name)!r} and is now {now.get(name)!r}" for name in names
            )
            raise ValueError(
                f"{self.folder} was started with other settings: {changes}. Pass the previous settings or choose "
                "another folder."
            )
