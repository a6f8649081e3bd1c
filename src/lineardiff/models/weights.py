"""Load the weights of a baseline into a VCA model, and report what was and was not loaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import timm
import torch
from timm.models import load_state_dict
from timm.models._features import FeatureGetterNet
from torch import Tensor, nn

from lineardiff.layers import VisualContrastAttention, resize_contrast_embed

__all__ = ["LoadReport", "checkpoint_filter_fn", "load_baseline", "vca_terms", "vca_terms_without_decay"]

_VCA_TERM = re.compile(
    r"(pos_embed_pos|pos_embed_neg|lambda[12]_[qk][12]|norm[12]\.weight|conv\.(weight|bias))"
)


@dataclass(frozen=True)
class LoadReport:
    """The outcome of loading weights; `print(report)` gives a summary.

    Attributes:
        loaded: Parameters that hold the given weights.
        resized: Loaded parameters that were resampled to fit, such as position embeddings.
        vca_terms: Parameters of Visual-Contrast Attention that keep their initial values.
        classifier: Parameters of the classifier that keep their initial values because the number of classes differs.
        unused: Given weights that match no parameter.
    """

    loaded: tuple[str, ...]
    resized: tuple[str, ...]
    vca_terms: tuple[str, ...]
    classifier: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} parameters loaded"]
        for names, text in (
            (self.resized, "resized to fit"),
            (self.vca_terms, "of Visual-Contrast Attention keep their initial values"),
            (self.classifier, "of the classifier keep their initial values (another number of classes)"),
            (self.unused, "given but not used"),
        ):
            if names:
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                lines.append(f"{len(names)} {text}: {shown}")
        return "\n".join(lines)


def load_baseline(model: nn.Module, weights: str | Path | Mapping[str, Tensor]) -> LoadReport:
    """Load the weights of a baseline into a model with Visual-Contrast Attention.

    Everything but the VCA terms is loaded, so the model must be fine-tuned before it can classify.

    Args:
        model: A model of this library, changed in place; also one built with `features_only=True`.
        weights: Weights of timm's DeiT or Swin, or of PVT or CSwin in the layout of this library or of their
            authors: a state dict, the path of a .safetensors or .pth file (read without unpickling code), or the name
            of one of timm's pretrained models, such as "deit_tiny_patch16_224.fb_in1k", which is fetched from the
            Hugging Face Hub.

    Returns:
        What was and was not loaded.

    Raises:
        ValueError: The weights are of another model, the file is damaged, or the name cannot be fetched.
    """
    given = dict(weights) if isinstance(weights, Mapping) else _read(weights)
    before = {name: tuple(value.shape) for name, value in given.items() if isinstance(value, Tensor)}
    if isinstance(model, FeatureGetterNet):  # built with features_only=True
        model = model.model
    if not hasattr(model, "filter_checkpoint"):
        raise ValueError(
            f"{type(model).__name__} is not a model of lineardiff; create one with timm.create_model, such as "
            "vca_deit_tiny_patch16_224."
        )
    _refuse_further_blocks(given, model)  # before timm's filters look up their modules
    given = checkpoint_filter_fn(given, model)
    _refuse_further_blocks(given, model)  # now under the names of this library
    own = model.state_dict()
    terms = vca_terms(model)
    cfg = getattr(model, "default_cfg", {}).get("classifier", ())
    heads = (cfg,) if isinstance(cfg, str) else tuple(cfg or ())
    classifier = {name for name in own if name.rsplit(".", 1)[0] in heads}

    loaded, kept = {}, set()
    for name, value in own.items():
        if name in given and given[name].shape == value.shape:
            loaded[name] = given[name]
        elif name in terms or name in classifier:
            kept.add(name)
        else:
            found = f"has shape {tuple(given[name].shape)}" if name in given else "is missing"
            raise ValueError(
                f"The weights are of another model: {name} {found}, expected {tuple(value.shape)}; "
                "pass weights of a baseline of the same width, depth and patch size."
            )
    model.load_state_dict(loaded, strict=False)
    return LoadReport(
        loaded=tuple(loaded),
        resized=tuple(n for n in loaded if n in before and before[n] != tuple(loaded[n].shape)),
        vca_terms=tuple(n for n in own if n in kept & terms),
        classifier=tuple(n for n in own if n in kept & classifier),
        unused=tuple(n for n in given if n not in loaded),
    )


def _refuse_further_blocks(given: Mapping[str, Tensor], model: nn.Module) -> None:
    modules = dict(model.named_modules())
    for name in given:
        match = re.match(r"(.*?blocks)\.\d+(?=\.)", name)
        if match and match[1] in modules and match[0] not in modules:
            raise ValueError(
                f"The weights are of another model: it has {name}, this one has {len(modules[match[1]])} blocks there; "
                "pass weights of a baseline of the same depth."
            )


def vca_terms(model: nn.Module) -> set[str]:
    """Return the names of the parameters that Visual-Contrast Attention adds to self-attention."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, VisualContrastAttention)
        for name, _ in module.named_parameters()
        if _VCA_TERM.fullmatch(name)
    }


def vca_terms_without_decay(model: nn.Module) -> set[str]:
    """Return the names of the lambdas and contrast embeddings, which are not decayed."""
    return {name for name in vca_terms(model) if "lambda" in name or "pos_embed" in name}


def checkpoint_filter_fn(state_dict: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert the weights of a checkpoint to the names and shapes of a model of this library.

    The model's `filter_checkpoint` renames the authors' names and resizes positions; contrast embeddings of another,
    square contrast grid are resized here. timm calls this for pretrained weights.

    Raises:
        ValueError: A contrast embedding has another number of rows, which is not a square.
    """
    filtered: dict[str, Tensor] = model.filter_checkpoint(dict(state_dict))  # type: ignore[operator]
    for prefix, module in model.named_modules():
        if not isinstance(module, VisualContrastAttention):
            continue
        for name in ("pos_embed_pos", "pos_embed_neg"):
            key = f"{prefix}.{name}".lstrip(".")
            own = getattr(module, name)
            if own is not None and key in filtered and filtered[key].shape[0] != own.shape[0]:
                filtered[key] = resize_contrast_embed(filtered[key], new_grid=module.contrast_grid)
    return filtered


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the weights in a .safetensors or .pth file, which is read without unpickling code.

    Args:
        path: Weights nested under "state_dict", "model" or, if alone, "state_dict_ema" are found.

    Raises:
        ValueError: The file is damaged or holds anything but tensors.
    """
    try:
        given = dict(load_state_dict(str(path), use_ema=False, weights_only=True))
        given = dict(given.get("state_dict_ema", given))  # the authors of CSwin publish these alone
        if not given or not all(isinstance(value, Tensor) for value in given.values()):
            raise TypeError("it holds no state dict of tensors")
    except Exception as error:
        reason = (str(error) or "unreadable").splitlines()[0]
        raise ValueError(
            f"{path} cannot be read as weights ({type(error).__name__}: {reason}); pass a complete .safetensors file, "
            "or a .pth file that holds only tensors."
        ) from error
    return given


def _read(weights: str | Path) -> dict[str, Tensor]:
    path = Path(weights)
    if path.is_file():
        return read_weights(path)
    name = str(weights)
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(f"{name!r} is neither a file nor a model of timm; check the path or name.")
    try:
        with torch.device("cpu"):
            return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:
        raise ValueError(
            f"The weights of {name!r} could not be fetched ({type(error).__name__}: {str(error).splitlines()[0]}); "
            "check the connection, or pass the path of a file."
        ) from error
