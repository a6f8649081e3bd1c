"""Learning curves, attention maps, and the report that compares trained models."""

from lineardiff.visualize.curves import plot_curves, read_curve
from lineardiff.visualize.maps import plot_signed_attention, signed_attention
from lineardiff.visualize.report import Example, Picture, report_html

__all__ = [
    "Example",
    "Picture",
    "plot_curves",
    "plot_signed_attention",
    "read_curve",
    "report_html",
    "signed_attention",
]
