"""Visual-Contrast Attention for PyTorch: linear-complexity, differential attention for vision transformers.

Importing it registers the models with timm: `timm.create_model("vca_deit_tiny_patch16_224")`.
"""

from lineardiff._version import __version__
from lineardiff.layers import VisualContrastAttention
from lineardiff.models import LoadReport, load_baseline
from lineardiff.ops import backend, set_backend, visual_contrast_attention

__all__ = [
    "LoadReport",
    "VisualContrastAttention",
    "__version__",
    "backend",
    "load_baseline",
    "set_backend",
    "visual_contrast_attention",
]
