"""Visual-Contrast Attention for PyTorch: linear-complexity, differential attention for vision transformers.

Importing the package registers its classifiers with timm: `timm.create_model("vca_deit_tiny_patch16_224")`. The
other public names are imported on first use, so that `import lineardiff` costs little more than `import timm`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lineardiff import models
from lineardiff._version import __version__

if TYPE_CHECKING:
    from lineardiff.bench import multiply_adds
    from lineardiff.layers import VisualContrastAttention
    from lineardiff.models import LoadReport, create_dit, load_baseline
    from lineardiff.models.dit import DiT
    from lineardiff.ops import backend, list_backends, set_backend, visual_contrast_attention
    from lineardiff.pipelines.pipeline import LinearDiffPipeline
    from lineardiff.runs import load_run

__all__ = [
    "DiT",
    "LinearDiffPipeline",
    "LoadReport",
    "VisualContrastAttention",
    "__version__",
    "backend",
    "create_dit",
    "list_backends",
    "load_baseline",
    "load_run",
    "multiply_adds",
    "set_backend",
    "visual_contrast_attention",
]

_HOMES = {
    "DiT": "lineardiff.models.dit",
    "LinearDiffPipeline": "lineardiff.pipelines.pipeline",
    "LoadReport": "lineardiff.models",
    "VisualContrastAttention": "lineardiff.layers",
    "backend": "lineardiff.ops",
    "create_dit": "lineardiff.models",
    "list_backends": "lineardiff.ops",
    "load_baseline": "lineardiff.models",
    "load_run": "lineardiff.runs",
    "multiply_adds": "lineardiff.bench",
    "set_backend": "lineardiff.ops",
    "visual_contrast_attention": "lineardiff.ops",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lineardiff' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
