"""Visual-Contrast Attention as a layer, and the attentions it is compared with."""

from lineardiff.layers.attention import VisualContrastAttention
from lineardiff.layers.baselines import AgentAttention, DifferentialAttention, SelfAttention
from lineardiff.layers.factory import AttentionOptions, create_attention, list_attentions
from lineardiff.layers.parts import resize_contrast_embed

__all__ = [
    "AgentAttention",
    "AttentionOptions",
    "DifferentialAttention",
    "SelfAttention",
    "VisualContrastAttention",
    "create_attention",
    "list_attentions",
    "resize_contrast_embed",
]
