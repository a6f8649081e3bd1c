"""Whole models, inference: python -m benchmarks.model deit_tiny_patch16_224 vca_deit_tiny_patch16_224 --threads 2

Milliseconds of one batch, interleaved round by round in one process, medians with quartiles, `ratio` to the first
model; then the peak memory of each, in a process of its own: how far the resident memory rises above that of the model
and the images. --csv FILE writes the table. Training steps: benchmarks.train.
"""

import sys

import torch

from benchmarks.common import (
    MODEL_COLUMNS,
    argument_parser,
    measure_models,
    model_arguments,
    print_machine,
    save,
)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="+")
    model_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print_machine()
    rows = measure_models(arguments.models, arguments, mode="inference")
    save(arguments.csv, MODEL_COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(main())
