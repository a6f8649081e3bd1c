"""Weight files: safetensors with a checksum inside, and the formats that other people publish."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lineardiff.files import fingerprint
from lineardiff.models.weights import read_weights

__all__ = ["load_weights", "weights_as_bytes"]

_CHECKSUM = "sha256"


def weights_as_bytes(module: nn.Module) -> bytes:
    """Return the parameters and buffers of a module as a safetensors file whose metadata holds their checksum."""
    tensors = {name: t.detach().contiguous().cpu() for name, t in module.state_dict().items()}
    # One entry only: safetensors writes several in random order.
    return safetensors.torch.save(tensors, metadata={_CHECKSUM: _checksum(tensors)})


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load a file of weights into `model`, which must have the same tensors of the same shapes.

    Args:
        model: Changed in place.
        path: A safetensors file, or a PyTorch file of tensors, which is read without unpickling code; the weights
            may be nested under "model" or "state_dict".

    Raises:
        ValueError: The file is missing, damaged or holds the weights of another model; the message names the
            tensors that differ.
    """
    path = Path(path)
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"{path} {found}; expected a .safetensors or .pth file of weights.")
    tensors = _read_safetensors(path) if path.suffix == ".safetensors" else read_weights(path)
    differences = _differences(model.state_dict(), tensors)
    if differences:
        raise ValueError(
            f"{path} holds the weights of another model: {'; '.join(differences)}. Build the model with the name and "
            "the arguments it was trained with."
        )
    model.load_state_dict(tensors)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = safetensors.torch.load_file(path)
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get(_CHECKSUM)
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged ({str(error).splitlines()[0]}). Restore it from a copy."
        ) from error
    if expected is not None and expected != _checksum(tensors):
        raise ValueError(f"{path} is damaged (its checksum does not match). Restore it from a copy.")
    return tensors


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    def blocks() -> Iterator[bytes]:
        for name in sorted(tensors):
            tensor = tensors[name]
            yield f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode()
            yield tensor.reshape(-1).view(torch.uint8).numpy().tobytes()

    return fingerprint(blocks())


def _differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], *, shown: int = 3) -> list[str]:
    shapes = [
        f"{name} is {tuple(found[name].shape)}, the model's {tuple(expected[name].shape)}"
        for name in expected.keys() & found.keys()
        if found[name].shape != expected[name].shape
    ]
    kinds = {
        "other shapes": sorted(shapes),
        "missing": sorted(expected.keys() - found.keys()),
        "not in the model": sorted(found.keys() - expected.keys()),
    }
    return [
        f"{kind}: {', '.join(names[:shown])}"
        + (f" and {len(names) - shown} more" if len(names) > shown else "")
        for kind, names in kinds.items()
        if names
    ]
