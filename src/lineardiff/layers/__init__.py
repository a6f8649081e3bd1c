"""Floor 1: Visual-Contrast Attention as a layer, and the attentions it is compared with."""

from lineardiff.layers.arms import (
    Arm,
    AttentionOptions,
    check_arms,
    create_attention,
    has_option,
    say_ignored,
)
from lineardiff.layers.attention import VisualContrastAttention
from lineardiff.layers.baselines import AgentAttention, DifferentialAttention, SelfAttention
from lineardiff.layers.tokens import resize_contrast_embed
from lineardiff.ops import pool_grid
