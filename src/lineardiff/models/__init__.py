"""Floor 3: classifiers on timm's registry. Importing it registers them."""

from lineardiff.models import vca_deit
from lineardiff.models.weights import LoadReport, load_baseline
