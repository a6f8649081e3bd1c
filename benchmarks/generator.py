"""A DiT or SiT against its VCA form: python -m benchmarks.generator sit_s_2 vca_sit_s_2 --latents 32 64 128

Milliseconds of one sampling step (the network once, without gradients) and of one training step (forward, mean
square, backward, AdamW), interleaved round by round in one process, medians with quartiles. --csv FILE writes the
table.
"""

import sys
from collections.abc import Callable

import torch

from benchmarks.common import argument_parser, print_machine, save
from lineardiff.bench import interleaved
from lineardiff.models import create_dit

COLUMNS = (
    "step",
    "latent",
    "tokens",
    "batch",
    "dtype",
    "threads",
    "model",
    "ms",
    "low_ms",
    "high_ms",
    "ratio",
)


def steps(
    model: torch.nn.Module, latent: int, batch: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """One sampling step and one training step of a model."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, 4, latent, latent, generator=generator).to(dtype)
    t = torch.rand(batch, generator=generator)
    y = torch.arange(batch) % 1000
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def sampling() -> None:
        with torch.inference_mode():
            model.eval()(x, t, y)

    def training() -> None:
        optimizer.zero_grad(set_to_none=True)
        model.train()(x, t, y).sample.float().square().mean().backward()
        optimizer.step()

    return {"sampling": sampling, "training": training}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--latents", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    print_machine()
    form = "{:>9} " * 6 + "{:<14} " + "{:>9} " * 4
    print(form.format(*COLUMNS))
    rows = []
    for latent in arguments.latents:
        torch.manual_seed(0)
        models = {name: create_dit(name, sample_size=latent).to(dtype) for name in arguments.models}
        tokens = (latent // next(iter(models.values())).config.patch_size) ** 2
        all_steps = {n: steps(m, latent, arguments.batch_size, dtype) for n, m in models.items()}
        for step in ("sampling", "training"):
            timings = interleaved({name: s[step] for name, s in all_steps.items()}, rounds=arguments.rounds)
            first = timings[arguments.models[0]].median
            for name, timing in timings.items():
                numbers = (f"{1000 * x:.1f}" for x in (timing.median, timing.low, timing.high))
                row = (
                    step,
                    latent,
                    tokens,
                    arguments.batch_size,
                    arguments.dtype,
                    arguments.threads,
                    name,
                    *numbers,
                )
                rows.append((*row, f"{first / timing.median:.2f}"))
                print(form.format(*map(str, rows[-1])), flush=True)
    save(arguments.csv, COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(main())
