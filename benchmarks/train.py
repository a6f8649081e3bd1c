"""Training steps: of whole models, and forward + backward of the op: python -m benchmarks.train --threads 2

First the models (forward, cross-entropy, backward, AdamW), as benchmarks.model does; then the op at the paper's shapes
against `scaled_dot_product_attention` on the same tensors, gradients of all of them. --csv FILE writes the models; the
op is written beside it as FILE_op.csv with its .json and .png.
"""

import sys
from pathlib import Path

import torch

from benchmarks.common import (
    MODEL_COLUMNS,
    SHAPES,
    argument_parser,
    measure_models,
    model_arguments,
    print_machine,
    save,
)
from lineardiff.bench import Limits, Shape, op_candidates
from lineardiff.bench.candidates import runnable_backends
from lineardiff.cli.bench import measure_and_save


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="*", default=["deit_tiny_patch16_224", "vca_deit_tiny_patch16_224"])
    model_arguments(parser)
    parser.set_defaults(csv=Path("bench/train.csv"), batch_size=8)
    parser.add_argument("--backends", nargs="+", default=[b for b in runnable_backends() if b != "reference"])
    parser.add_argument("--only", choices=("models", "op"), help="leave the other out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    arguments.csv.parent.mkdir(parents=True, exist_ok=True)
    if arguments.only != "op":
        print_machine()
        rows = measure_models(arguments.models, arguments, mode="training")
        save(arguments.csv, MODEL_COLUMNS, rows)
    if arguments.only != "models":
        measure_and_save(
            op_candidates(arguments.backends, pooling=True),
            [Shape(*shape) for shape in SHAPES],
            output=arguments.csv.parent,
            name=f"{arguments.csv.stem}_op",
            settings={name: str(value) for name, value in vars(arguments).items()},
            modes=["train"],
            dtypes=[torch.float32, torch.bfloat16],
            limits=Limits(rounds=arguments.rounds, seconds=arguments.seconds / 3, shape_seconds=60.0),
        )


if __name__ == "__main__":
    sys.exit(main())
