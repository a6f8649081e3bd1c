"""Attention, forward, op and layer, at the paper's shapes and over N: python -m benchmarks.attention --threads 2

Interleaved in one process with `scaled_dot_product_attention` on the same tensors; medians, quartiles, peak memory;
"+pool" includes the pooling of q into contrast tokens. Writes FILE.csv, and beside it a .json (hardware, threads,
versions, crossovers) and a .png. The same for shapes of your own: lineardiff bench.
"""

import sys
from pathlib import Path

import torch

from benchmarks.common import SHAPES, SWEEP, argument_parser
from lineardiff.bench import Limits, Shape, layer_candidates, op_candidates
from lineardiff.bench.candidates import runnable_backends
from lineardiff.cli.bench import installed_peers, measure_and_save


def main() -> None:
    parser = argument_parser(__doc__)
    parser.set_defaults(csv=Path("bench/attention.csv"))
    parser.add_argument("--backends", nargs="+", default=[b for b in runnable_backends() if b != "reference"])
    parser.add_argument("--levels", nargs="+", choices=("op", "layer"), default=["op", "layer"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument("--seconds", type=float, default=0.3, help="of one measurement")
    parser.add_argument(
        "--no-sweep", action="store_true", help="only the shapes of the paper, not N = 49 ... 65536"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    candidates = op_candidates(arguments.backends, pooling=True) if "op" in arguments.levels else []
    if "layer" in arguments.levels:
        candidates += layer_candidates(arguments.backends, installed_peers(None, say=print))
    measure_and_save(
        candidates,
        [Shape(*shape) for shape in (*SHAPES, *(() if arguments.no_sweep else SWEEP))],
        output=arguments.csv.parent,
        name=arguments.csv.stem,
        settings={name: str(value) for name, value in vars(arguments).items()},
        modes=["forward"],
        dtypes=[getattr(torch, name) for name in arguments.dtypes],
        limits=Limits(seconds=arguments.seconds, shape_seconds=60.0),
    )


if __name__ == "__main__":
    sys.exit(main())
