"""Speed, peak memory and cost of attention, models and generators; one clock, one form of results."""

from lineardiff.bench.attention import Limits, measure_attention
from lineardiff.bench.candidates import Candidate, Shape, layer_candidates, op_candidates
from lineardiff.bench.cost import multiply_adds, parameters
from lineardiff.bench.machine import describe_machine
from lineardiff.bench.memory import peak_memory
from lineardiff.bench.networks import Speed, images_per_second, measure_networks
from lineardiff.bench.rows import Crossover, Row, crossover
from lineardiff.bench.timing import Timing, interleaved

__all__ = [
    "Candidate",
    "Crossover",
    "Limits",
    "Row",
    "Shape",
    "Speed",
    "Timing",
    "crossover",
    "describe_machine",
    "images_per_second",
    "interleaved",
    "layer_candidates",
    "measure_attention",
    "measure_networks",
    "multiply_adds",
    "op_candidates",
    "parameters",
    "peak_memory",
]
