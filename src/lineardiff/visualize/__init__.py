"""Figures and pages about runs and models. Needs matplotlib: ``pip install "lineardiff[train]"``."""

from lineardiff.visualize.curves import plot_curves, read_curve
from lineardiff.visualize.maps import plot_signed_attention, signed_attention
from lineardiff.visualize.report import Example, Picture, report_html
