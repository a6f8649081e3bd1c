"""Classifiers, registered with timm on import, and the configurations of DiT and SiT."""

from lineardiff.models import vca_cswin, vca_deit, vca_pvt, vca_swin
from lineardiff.models.dit_registry import DIT_CONFIGS, create_dit
from lineardiff.models.weights import LoadReport, load_baseline

__all__ = ["DIT_CONFIGS", "LoadReport", "create_dit", "load_baseline"]
