"""A DiT that answers something: its zero layers are woken, so that a comparison does not compare 0 with 0."""

import torch
from torch import nn

from lineardiff.models.dit import DiT

TINY = {
    "sample_size": (8, 12),
    "patch_size": 2,
    "dim": 32,
    "depth": 2,
    "num_heads": 2,
    "num_classes": 5,
}


class AwakeDiT(DiT):
    """Overrides the hook, not `__init__`, whose signature `from_config` reads."""

    def initialize_weights(self):
        super().initialize_weights()
        for parameter in self.parameters():
            if not parameter.is_meta and not parameter.any():
                nn.init.normal_(parameter, std=0.2)


def batch(B=3):
    g = torch.Generator().manual_seed(7)
    return (
        torch.randn(B, 4, 8, 12, generator=g),
        torch.linspace(1, 900, B),
        torch.arange(B) % 5,
    )
