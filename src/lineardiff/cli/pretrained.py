"""Pipelines by folder or hub name, and the processes that use them together."""

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import PartialState

from lineardiff.cli.evaluate import choose_device
from lineardiff.generation.autoencoder import HUB_NAME, load_vae, loaded, quiet_diffusers

if TYPE_CHECKING:
    from lineardiff.generation.pipeline import LinearDiffPipeline


def join_processes(device: str | None) -> tuple[PartialState, torch.device]:
    """The processes that torchrun started, or this one alone, and the device of this one.

    Args:
        device: such as cpu or cuda:0; None takes the accelerator of this process if there is one.

    Raises:
        ValueError: the device does not exist here.
    """
    chosen = None if device is None else choose_device(device)
    on_cpu = not torch.accelerator.is_available() if chosen is None else chosen.type == "cpu"
    # one may wait for another for as long as a whole piece of its work takes
    state = PartialState(cpu=on_cpu, timeout=timedelta(days=1))
    return state, state.device if chosen is None else chosen


def find_pipeline(model: str) -> Path:
    """The folder of a pipeline: of a run, itself, or downloaded from the Hugging Face hub.

    Raises:
        ValueError: there is none.
    """
    path = Path(model).expanduser()
    for folder in (path / "pipeline", path):
        if (folder / "model_index.json").is_file():
            return folder
    if path.exists():
        raise ValueError(
            f"{path} holds no pipeline: no run of a generator, or one that has not finished; continue it with "
            "lineardiff train, or give a folder with model_index.json"
        )
    if not HUB_NAME.fullmatch(model):
        raise ValueError(
            f"{model} does not exist; expected the folder of a run, such as runs/fashion_sit, of a pipeline, or a "
            "name on the Hugging Face hub"
        )
    from lineardiff.generation.pipeline import LinearDiffPipeline

    return loaded(lambda: Path(LinearDiffPipeline.download(model)), f"the pipeline {model}")


def load_pipeline(folder: Path, *, vae: str | None = None) -> "LinearDiffPipeline":
    """The pipeline in a folder, with another autoencoder if one is named.

    Raises:
        ValueError: files are missing or damaged, or parts do not fit together.
        ImportError: diffusers is not installed.
    """
    from lineardiff.generation.pipeline import LinearDiffPipeline

    parts = {} if vae is None else {"vae": load_vae(vae)}
    quiet_diffusers()
    return loaded(
        lambda: LinearDiffPipeline.from_pretrained(str(folder), use_safetensors=True, **parts),
        f"the pipeline {folder}",
    )
