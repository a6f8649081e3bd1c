"""Floor 3: classifiers on timm's registry. Importing it registers them."""

from lineardiff.models import vca_cswin, vca_deit, vca_pvt, vca_swin
from lineardiff.models.dit_registry import DIT_CONFIGS, create_dit
from lineardiff.models.weights import LoadReport, load_baseline
