"""The attention, the convolution of V, and the backends that compute both. Imports torch only."""

from lineardiff.ops.backends import BackendInfo, backend, list_backends, set_backend
from lineardiff.ops.inputs import Inputs, Softmax, Stage
from lineardiff.ops.pooling import pool_grid
from lineardiff.ops.value_conv import add_value_conv
from lineardiff.ops.vca import attend, visual_contrast_attention

__all__ = [
    "BackendInfo",
    "Inputs",
    "Softmax",
    "Stage",
    "add_value_conv",
    "attend",
    "backend",
    "list_backends",
    "pool_grid",
    "set_backend",
    "visual_contrast_attention",
]
