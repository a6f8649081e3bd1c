"""Floor 1: Visual-Contrast Attention as a layer, and the attentions it is compared with."""

from lineardiff.layers.arms import Arm, check_arms, create_attention
from lineardiff.layers.attention import VisualContrastAttention
from lineardiff.layers.baselines import AgentAttention, DifferentialAttention, SelfAttention
from lineardiff.layers.tokens import pool_grid, resize_contrast_embed
