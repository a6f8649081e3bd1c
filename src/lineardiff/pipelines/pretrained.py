"""Pipelines by folder or hub name, and the processes that use them together."""

from pathlib import Path
from typing import TYPE_CHECKING

from lineardiff.files import HUB_NAME
from lineardiff.pipelines.autoencoder import load_vae, loaded, quiet_diffusers

if TYPE_CHECKING:
    from lineardiff.pipelines.pipeline import LinearDiffPipeline


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
    from lineardiff.pipelines.pipeline import LinearDiffPipeline

    return loaded(lambda: Path(LinearDiffPipeline.download(model)), f"the pipeline {model}")


def load_pipeline(folder: Path, *, vae: str | None = None) -> "LinearDiffPipeline":
    """The pipeline in a folder, with another autoencoder if one is named.

    Raises:
        ValueError: files are missing or damaged, or parts do not fit together.
        ImportError: diffusers is not installed.
    """
    from lineardiff.pipelines.pipeline import LinearDiffPipeline

    parts = {} if vae is None else {"vae": load_vae(vae)}
    quiet_diffusers()
    return loaded(
        lambda: LinearDiffPipeline.from_pretrained(str(folder), use_safetensors=True, **parts),
        f"the pipeline {folder}",
    )
