"""Weights of a baseline in a VCA model, and a report of what was and was not loaded."""

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

_VCA_TERM = re.compile(
    r"(pos_embed_pos|pos_embed_neg|lambda[12]_[qk][12]|norm[12]\.weight|conv\.(weight|bias))"
)


@dataclass(frozen=True)
class LoadReport:
    """What became of every parameter; `print(report)` reads well.

    Attributes:
        loaded: parameters that hold the given weights.
        resized: those of them whose position embedding or patch projection was resampled to fit.
        vca_terms: parameters of Visual-Contrast Attention, which a baseline does not have.
        classifier: parameters of a classifier for another number of classes.
        unused: given weights that the model has no place for.
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
    """Load the weights of a baseline into a model with Visual-Contrast Attention: timm's DeiT or Swin, or PVT or
    CSwin in the layout of this library or of their authors.

    Everything but the VCA terms is loaded: a model to fine-tune, not one that already classifies.

    Args:
        model: a model of this library, changed in place; features_only=True ones too.
        weights: a state dict, the path of a .safetensors or .pth file (read without unpickling code), or the
            name of one of timm's pretrained models, such as "deit_tiny_patch16_224.fb_in1k", fetched from
            the Hugging Face Hub.

    Returns:
        What was and was not loaded.

    Raises:
        ValueError: the weights are of another model, the file is damaged, or the name cannot be fetched.
    """
    given = dict(weights) if isinstance(weights, Mapping) else _read(weights)
    before = {name: tuple(value.shape) for name, value in given.items() if isinstance(value, Tensor)}
    if isinstance(model, FeatureGetterNet):  # what features_only=True makes
        model = model.model
    if not hasattr(model, "filter_checkpoint"):
        raise ValueError(
            f"{type(model).__name__} is not a model of lineardiff; create one, such as vca_deit_*."
        )
    _refuse_further_blocks(given, model)  # before timm's filters look for their modules
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
                f"the weights are of another model: {name} {found}, expected {tuple(value.shape)}; "
                "give the weights of the baseline with the same width, depth and patch size."
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
                f"the weights are of another model: it has {name}, this one has {len(modules[match[1]])} blocks there; "
                "give the weights of the baseline with the same depth."
            )


def vca_terms(model: nn.Module) -> set[str]:
    """Names of the parameters that Visual-Contrast Attention adds to a self-attention."""
    return {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if isinstance(module, VisualContrastAttention)
        for name, _ in module.named_parameters()
        if _VCA_TERM.fullmatch(name)
    }


def vca_terms_without_decay(model: nn.Module) -> set[str]:
    """Of the parameters that Visual-Contrast Attention adds, the lambdas and contrast embeddings."""
    return {name for name in vca_terms(model) if "lambda" in name or "pos_embed" in name}


def checkpoint_filter_fn(
    state_dict: Mapping[str, Tensor], model: nn.Module, *, contrast_grid: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """Weights of another layout or size, as the model takes them: what the model's `filter_checkpoint` does
    (names of the authors, positions of other images), and contrast embeddings of another contrast grid resized.

    Args:
        state_dict: of a checkpoint.
        model: to be loaded, of this library.
        contrast_grid: of the checkpoint; None takes a square one where the sizes differ.

    Raises:
        ValueError: a contrast embedding is of a non-square grid and `contrast_grid` is None.
    """
    filtered: dict[str, Tensor] = model.filter_checkpoint(dict(state_dict))  # type: ignore[operator]
    for prefix, module in model.named_modules():
        if not isinstance(module, VisualContrastAttention):
            continue
        for name in ("pos_embed_pos", "pos_embed_neg"):
            key = f"{prefix}.{name}".lstrip(".")
            own = getattr(module, name)
            if own is not None and key in filtered and filtered[key].shape[0] != own.shape[0]:
                filtered[key] = resize_contrast_embed(
                    filtered[key], new_grid=module.contrast_grid, old_grid=contrast_grid
                )
    return filtered


def _read(weights: str | Path) -> dict[str, Tensor]:
    path = Path(weights)
    if path.is_file():
        try:
            given = dict(load_state_dict(str(path), use_ema=False, weights_only=True))
            return dict(given.get("state_dict_ema", given))  # CSwin's authors publish these alone
        except Exception as error:
            raise ValueError(
                f"{path} cannot be read as weights ({type(error).__name__}: {error}); "
                "give a complete .safetensors file, or a .pth file that holds tensors only."
            ) from error
    name = str(weights)
    if not timm.is_model(name.split(".")[0]):
        raise ValueError(f"{name!r} is neither a file nor a model of timm; check the path or the name.")
    try:
        with torch.device("cpu"):
            return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:
        raise ValueError(
            f"the weights of {name!r} could not be fetched ({type(error).__name__}: {str(error).splitlines()[0]}); "
            "check the connection, or give the path of a file."
        ) from error
