"""``lineardiff bench``: speed and peak memory of the op, the layer, models and generators."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lineardiff.cli.arguments import parse
from lineardiff.suggest import suggest

if TYPE_CHECKING:
    from lineardiff.bench import Row

Modes = tuple[Literal["forward", "train"], ...]
Dtypes = tuple[Literal["float32", "bfloat16"], ...]

LARGEST = {"threads": 1024}
"""Largest value of a flag where it is not 2^31 - 1, beyond which torch cannot index."""

USAGE = """usage: lineardiff bench [op | layer | model | generator] [arguments]

Measure speed and peak memory on this machine.

  op         attention of given q, k, v over N tokens: VCA's backends and PyTorch's fused self-attention (default)
  layer      attention layers over N tokens, with their projections: also other linear attentions
  model      classifiers side by side: latency, throughput, training steps
  generator  DiT and SiT side by side: sampling and training steps

lineardiff bench op --help lists the arguments of one of them."""


@dataclass
class Op:
    """Time the backends of Visual-Contrast Attention and PyTorch's fused self-attention over N tokens.

    Writes op.csv, op.json (machine, settings, crossovers) and op.png to the output folder.
    """

    quick: bool = False
    """Finish within 3 minutes: fewer and shorter rounds, no call longer than 2.5 seconds, no reference backend."""
    paper: bool = False
    """Measure the paper's shapes and N = 49 to 65536 at 6 heads, instead of --sizes, --batch-size, --heads,
    --head-dim and --contrast-tokens."""
    sizes: tuple[int, ...] = (49, 196, 1024, 4096, 16384, 65536)
    """Tokens N of an image."""
    batch_size: int = 1
    """Images."""
    heads: int = 6
    """Attention heads."""
    head_dim: int = 64
    """Channels d of a head."""
    contrast_tokens: int = 49
    """Contrast tokens n."""
    dtypes: Dtypes = ("float32", "bfloat16")
    """Types of the tensors."""
    modes: Modes = ("forward", "train")
    """forward: without gradients; train: forward and backward."""
    backends: tuple[str, ...] | None = None
    """Backends to time; None takes every one that can run here (with --quick, all but reference)."""
    pooling: bool = False
    """Also time VCA with the pooling of q into contrast tokens."""
    rounds: int | None = None
    """Measurements of each candidate; None: 9, with --quick 5."""
    seconds: float | None = None
    """Approximate duration of one measurement; None: 0.1, with --quick 0.02."""
    threads: int | None = None
    """Threads of PyTorch; None keeps its default."""
    device: str | None = None
    """For example cpu or cuda:0; None takes the accelerator if there is one."""
    output: Path = Path("bench")
    """Folder of the files; earlier files of the same name are replaced."""


@dataclass
class Layer(Op):
    """Time the attention layer, timm's self-attention and other linear attentions over N tokens.

    Writes layer.csv, layer.json (machine, settings, crossovers) and layer.png to the output folder.
    """

    pooling: Annotated[bool, tyro.conf.Suppress] = False
    peers: tuple[str, ...] | None = None
    """Other attentions; None takes every one that is installed."""


@dataclass
class Model:
    """Time classifiers side by side, in one interleaved run, then the peak memory of each in its own process.

    Writes model.csv and model.json (machine, settings) to the output folder.
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ("deit_tiny_patch16_224", "vca_deit_tiny_patch16_224")
    """Models of timm's registry, those of lineardiff included; ratios compare with the first."""
    paper: bool = False
    """Measure the paper's DeiT-T, PVT-T, Swin-T and CSwin-T, each with its VCA form, instead of the names."""
    sizes: tuple[int, ...] = (224,)
    """Pixels per side of the images."""
    batch_sizes: tuple[int, ...] = (1, 8)
    """Images per call; batch 1 gives the latency."""
    modes: Modes = ("forward",)
    """forward: without gradients; train: forward, cross-entropy, backward, AdamW."""
    dtypes: Dtypes = ("float32",)
    """Types of weights and images."""
    threads: tuple[int, ...] | None = None
    """Threads of PyTorch, all in the same run; None takes 1 and its default."""
    compile: bool = False
    """Compile all models with torch.compile. Peak memory is not measured."""
    rounds: int = 9
    """Measurements of each model."""
    seconds: float = 0.3
    """Approximate duration of one measurement."""
    device: str | None = None
    """For example cpu or cuda:0; None takes the accelerator if there is one."""
    output: Path = Path("bench")
    """Folder of the files; earlier files of the same name are replaced."""


@dataclass
class Generator(Model):
    """Time DiT and SiT side by side: one sampling step without guidance, and one training step.

    Writes generator.csv and generator.json (machine, settings) to the output folder.
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ("sit_s_2", "vca_sit_s_2")
    """Names such as dit_b_4 and vca_sit_xl_2; ratios compare with the first."""
    paper: bool = False
    """Measure DiT-S/2 and SiT-S/2, each with its VCA form, instead of the names."""
    sizes: tuple[int, ...] = (32, 64, 128)
    """Sides of the latents, an eighth of the image's."""
    batch_sizes: tuple[int, ...] = (1,)
    """Images per call."""
    modes: Modes = ("forward", "train")
    """forward: one sampling step; train: forward, mean square, backward, AdamW."""


COMMANDS: dict[str, type[Op] | type[Model]] = {
    "op": Op,
    "layer": Layer,
    "model": Model,
    "generator": Generator,
}


def run(words: Sequence[str]) -> None:
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    name, *rest = words if words and not words[0].startswith("-") else ("op", *words)
    if name not in COMMANDS:
        raise ValueError(f"There is no benchmark {name!r}; {suggest(name, COMMANDS)}")
    arguments = parse(COMMANDS[name], rest, prog=f"lineardiff bench {name}")
    _check(arguments)
    if isinstance(arguments, Model):
        _networks(name, arguments)
    else:
        _attention(name, arguments)


def _attention(name: str, a: Op) -> "list[Row]":
    # Imported here because it takes seconds, which help and mistakes in flags should not.
    import torch

    from lineardiff.bench import Limits, Shape, layer_candidates, measure_attention, op_candidates, timing
    from lineardiff.bench.candidates import PAPER_SHAPES, PAPER_SWEEP, choose_backends, choose_peers
    from lineardiff.bench.report import record
    from lineardiff.device import choose_device

    device = choose_device(a.device)
    backends = choose_backends(a.backends, quick=a.quick)
    if isinstance(a, Layer):
        candidates = layer_candidates(backends, choose_peers(a.peers))
    else:
        candidates = op_candidates(backends, pooling=a.pooling)
    if a.threads is not None:
        torch.set_num_threads(a.threads)
    shapes = [Shape(a.batch_size, a.heads, N, a.head_dim, a.contrast_tokens) for N in sorted(set(a.sizes))]
    if a.paper:
        shapes = [*PAPER_SHAPES, *PAPER_SWEEP]
    given = {name: value for name in ("rounds", "seconds") if (value := getattr(a, name)) is not None}
    groups = measure_attention(
        candidates,
        shapes,
        modes=a.modes,
        dtypes=[getattr(torch, dtype) for dtype in a.dtypes],
        device=device,
        limits=Limits.quick(spent=timing.seconds_running(), **given) if a.quick else Limits(**given),
    )
    total = len(shapes) * len(a.dtypes) * len(a.modes)
    return record(groups, output=a.output, name=name, settings=_settings(a), total=total)


def _networks(name: Any, a: Model) -> "list[Row]":
    import itertools

    import torch

    from lineardiff.bench import measure_networks
    from lineardiff.bench.networks import PAPER_GENERATORS, PAPER_MODELS
    from lineardiff.bench.report import record
    from lineardiff.device import choose_device

    pairs = (PAPER_MODELS if name == "model" else PAPER_GENERATORS) if a.paper else (a.names,)
    groups = [
        measure_networks(
            tuple(dict.fromkeys(names)),
            level=name,
            sizes=a.sizes,
            batch_sizes=a.batch_sizes,
            threads=sorted({1, torch.get_num_threads()} if a.threads is None else set(a.threads)),
            modes=a.modes,
            dtypes=[getattr(torch, dtype) for dtype in a.dtypes],
            device=choose_device(a.device),
            rounds=a.rounds,
            seconds=a.seconds,
            compiled=a.compile,
        )
        for names in pairs
    ]
    total = len(pairs) * len(a.sizes) * len(a.dtypes) * len(a.modes)
    return record(itertools.chain(*groups), output=a.output, name=name, settings=_settings(a), total=total)


def _settings(arguments: Op | Model) -> dict[str, Any]:
    return {name: str(x) if isinstance(x, Path) else x for name, x in asdict(arguments).items()}


def _check(arguments: Op | Model) -> None:
    """Raise ValueError if a number is not positive and finite, or a list is empty."""
    for name in (field.name for field in fields(arguments)):
        value, flag = getattr(arguments, name), f"--{name.replace('_', '-')}"
        if value == ():
            raise ValueError(f"{flag} is empty; give at least one value.")
        least, largest = 2 if name == "rounds" else 0, LARGEST.get(name, 2**31 - 1)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                continue
            if not (0 < number <= largest and number >= least and math.isfinite(number)):
                expected = f"at least {least}" if least else "positive"
                raise ValueError(f"{flag} is {number}; it must be {expected} and at most {largest}.")
