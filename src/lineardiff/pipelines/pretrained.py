"""Pipelines and autoencoders from folders or the Hugging Face hub, with errors of one line."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lineardiff.extras import missing_extra
from lineardiff.files import HUB_NAME

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

    from lineardiff.pipelines.pipeline import LinearDiffPipeline

__all__ = ["find_pipeline", "load_pipeline", "load_vae"]

Loaded = TypeVar("Loaded")


def find_pipeline(model: str) -> Path:
    """Return the folder of a saved pipeline, or download it from the hub.

    Raises:
        ValueError: There is none.
    """
    path = Path(model).expanduser()
    if (path / "model_index.json").is_file():
        return path
    if path.exists():
        raise ValueError(
            f"{path} holds no pipeline; expected the folder of a run of a DiT or SiT, one of its checkpoints, or a "
            "folder with model_index.json."
        )
    if not HUB_NAME.fullmatch(model):
        raise ValueError(
            f"{model} does not exist; expected the folder of a run, such as runs/fashion_sit, of a pipeline, or a "
            "name on the Hugging Face hub."
        )
    from lineardiff.pipelines.pipeline import LinearDiffPipeline

    return _load(lambda: Path(LinearDiffPipeline.download(model)), f"the pipeline {model}")


def load_pipeline(folder: Path, *, vae: str | None = None) -> "LinearDiffPipeline":
    """Load the pipeline in a folder, with another autoencoder if `vae` names one.

    Raises:
        ValueError: Files are missing or damaged, or parts do not fit together.
        ImportError: diffusers is not installed.
    """
    from lineardiff.pipelines.pipeline import LinearDiffPipeline

    parts = {} if vae is None else {"vae": load_vae(vae)}
    return _load(
        lambda: LinearDiffPipeline.from_pretrained(str(folder), use_safetensors=True, **parts),
        f"the pipeline {folder}",
    )


def load_vae(name: str) -> "AutoencoderKL":
    """Load an AutoencoderKL of diffusers from a folder or the Hugging Face hub, in evaluation mode.

    Raises:
        ValueError: It does not exist, or its files are damaged or not safetensors.
        ImportError: diffusers is not installed.
    """
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise missing_extra("generate", package="diffusers") from error
    folder = Path(name).expanduser()
    if not folder.is_dir() and not HUB_NAME.fullmatch(name):
        raise ValueError(
            f"the autoencoder {name} does not exist; expected a folder with its config.json, or a name on the Hugging "
            "Face hub such as stabilityai/sd-vae-ft-ema."
        )
    where = str(folder) if folder.is_dir() else name
    return _load(
        lambda: AutoencoderKL.from_pretrained(where, use_safetensors=True).eval(), f"the autoencoder {name}"
    )


def _load(load: Callable[[], Loaded], what: str) -> Loaded:
    """Call `load`, and turn its exceptions into a ValueError of one line."""
    _quiet_diffusers()
    try:
        return load()
    # huggingface_hub, safetensors and diffusers raise many types of errors, with pages of advice
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{what} cannot be loaded ({lines[0].rstrip('.')}); check the name, the files and, for a name on the "
            "Hugging Face hub, the network."
        ) from error


def _quiet_diffusers() -> None:
    """Disable diffusers' progress bars, and its logging of errors that it also raises."""
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    for handler in logging.getLogger("diffusers").handlers:
        handler.addFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
