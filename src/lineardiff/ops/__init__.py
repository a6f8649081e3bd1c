"""Floor 0: the op and its backends. Imports torch only."""

from lineardiff.ops.backends import BACKENDS, Backend, backend, list_backends, select, set_backend
from lineardiff.ops.inputs import Inputs, Softmax, Stage
from lineardiff.ops.pooling import pool_grid
from lineardiff.ops.value_conv import add_value_conv
from lineardiff.ops.vca import attend, visual_contrast_attention
