"""The autoencoder between images and the latents that DiT and SiT see; what diffusers cannot load, in one line."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from lineardiff.files import HUB_NAME, fingerprint

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

LATENT_SCALE = 0.18215
"""The networks see the VAE's latents times this, as those of DiT's and SiT's authors."""

Loaded = TypeVar("Loaded")


def fingerprint_of(vae: "AutoencoderKL") -> str:
    """Of the weights, by which another autoencoder of the same name is told apart."""
    state = sorted(vae.state_dict().items())
    return fingerprint(
        part
        for name, value in state
        for part in (name.encode(), value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    )


def load_vae(name: str) -> "AutoencoderKL":
    """An AutoencoderKL of diffusers, from a folder or the Hugging Face hub.

    Raises:
        ValueError: there is none of that name, or its files are damaged or not safetensors.
        ImportError: diffusers is not installed.
    """
    try:
        from diffusers import AutoencoderKL
    except ImportError as error:
        raise ImportError(
            "autoencoders are models of diffusers: pip install 'lineardiff[generate]'"
        ) from error
    folder = Path(name).expanduser()
    if not folder.is_dir() and not HUB_NAME.fullmatch(name):
        raise ValueError(
            f"the autoencoder {name} does not exist; expected a folder with its config.json, or a name on the Hugging "
            "Face hub such as stabilityai/sd-vae-ft-ema"
        )
    quiet_diffusers()
    where = str(folder) if folder.is_dir() else name
    return loaded(
        lambda: AutoencoderKL.from_pretrained(where, use_safetensors=True).eval(), f"the autoencoder {name}"
    )


def loaded(load: Callable[[], Loaded], what: str) -> Loaded:
    """What `load` gives.

    Raises:
        ValueError: it cannot be loaded; one line of diffusers' reason, and what to check.
    """
    try:
        return load()
    # huggingface_hub, safetensors and diffusers raise errors of many kinds, with pages of advice
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{what} cannot be loaded ({lines[0].rstrip('.')}): check the name, the files and, for a name on the "
            "Hugging Face hub, the network"
        ) from error


def quiet_diffusers() -> None:
    """Keep diffusers from drawing progress bars, and from logging errors that it raises anyway."""
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    for handler in logging.getLogger("diffusers").handlers:
        handler.addFilter(_below_error)


def _below_error(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR
