"""Learning curves, attention maps, and the comparison of trained models as a report."""

from lineardiff.visualize.comparison import ScoredModel, compare_models, score_model, write_comparison
from lineardiff.visualize.curves import plot_curves
from lineardiff.visualize.maps import plot_signed_attention, signed_attention
from lineardiff.visualize.report import Example, Picture, comparison_table, describe_comparison, report_html

__all__ = [
    "Example",
    "Picture",
    "ScoredModel",
    "compare_models",
    "comparison_table",
    "describe_comparison",
    "plot_curves",
    "plot_signed_attention",
    "report_html",
    "score_model",
    "signed_attention",
    "write_comparison",
]
