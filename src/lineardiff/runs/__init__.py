"""The folder of a run: its format, its writer and its reader."""

from lineardiff.runs.model import build_model
from lineardiff.runs.run import Curves, Run, load_run
from lineardiff.runs.weights import load_weights

__all__ = ["Curves", "Run", "build_model", "load_run", "load_weights"]
