"""Speed, memory and cost: of attention, of layers, of whole models."""

from lineardiff.bench.attention import Limits, measure_attention
from lineardiff.bench.candidates import Candidate, Shape, layer_candidates, op_candidates
from lineardiff.bench.cost import multiply_adds, parameters
from lineardiff.bench.machine import environment
from lineardiff.bench.memory import peak_memory
from lineardiff.bench.plot import plot_attention_speed
from lineardiff.bench.rows import Crossover, Row, crossover
from lineardiff.bench.speed import Speed, images_per_second
from lineardiff.bench.timing import Timing, interleaved
