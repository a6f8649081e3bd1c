"""``lineardiff bench``: how fast attention is on this machine, and from how many tokens on."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lineardiff.cli.arguments import parse

if TYPE_CHECKING:
    from lineardiff.bench import Candidate, Limits, Row


@dataclass
class Bench:
    """Time the backends of Visual-Contrast Attention against PyTorch's fused self-attention, over N tokens.

    Writes bench.csv, bench.json (hardware, threads, versions, crossovers) and bench.png into the output folder.
    """

    quick: bool = False
    """Within 3 minutes: fewer and shorter rounds, no call longer than 2.5 seconds, no reference backend."""
    level: Literal["op", "layer"] = "op"
    """op: attention of given q, k, v; layer: of x, with its projections, where the peers take part."""
    sizes: tuple[int, ...] = (49, 196, 1024, 4096, 16384, 65536)
    """Tokens N of an image."""
    batch_size: int = 1
    """Images."""
    heads: int = 6
    """Heads of the attention."""
    head_dim: int = 64
    """Channels d of a head."""
    contrast_tokens: int = 49
    """Contrast tokens n; also the landmarks of the peers."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """Of the tensors."""
    modes: tuple[Literal["forward", "train"], ...] = ("forward", "train")
    """forward: without gradients; train: forward and backward."""
    backends: tuple[str, ...] | None = None
    """Of the op; None takes every one that can run here (with --quick, all but reference)."""
    peers: tuple[str, ...] | None = None
    """With --level layer: other attentions; None takes every one that is installed."""
    pooling: bool = False
    """With --level op: VCA also with the pooling of q into contrast tokens."""
    threads: int | None = None
    """That PyTorch computes with; None leaves its choice."""
    seconds: float | None = None
    """Of one measurement; None: 0.1, with --quick 0.02."""
    device: str | None = None
    """Such as cpu or cuda:0; None takes the accelerator if there is one."""
    output: Path = Path("bench")
    """Folder of the files; those of an earlier run are replaced."""


def run(words: Sequence[str]) -> None:
    arguments = parse(Bench, words, prog="lineardiff bench")
    _check(arguments)
    # Here, because it takes seconds: help and mistakes in flags do not wait for it.
    import torch

    from lineardiff.bench import Shape
    from lineardiff.device import choose_device

    device = choose_device(arguments.device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    candidates = _candidates(arguments)
    a = arguments
    measure_and_save(
        candidates,
        [Shape(a.batch_size, a.heads, N, a.head_dim, a.contrast_tokens) for N in sorted(set(a.sizes))],
        output=a.output,
        settings={name: str(x) if isinstance(x, Path) else x for name, x in asdict(a).items()},
        modes=a.modes,
        dtypes=[getattr(torch, name) for name in a.dtypes],
        device=device,
        limits=_limits(arguments),
    )


def measure_and_save(
    candidates: "Sequence[Candidate]",
    shapes: Sequence[Any],
    *,
    output: Path,
    settings: dict[str, Any],
    name: str = "bench",
    **options: Any,
) -> "list[Row]":
    """Measure with a progress bar, print the tables, write the files; an interruption keeps what there is.

    Args:
        candidates, shapes: Of :func:`lineardiff.evaluate.measure_attention`.
        output: Folder of NAME.csv, NAME.json and NAME.png.
        settings: Goes into the JSON file.
        options: Of `measure_attention`.
    """
    from tqdm import tqdm

    from lineardiff.bench import attention, environment
    from lineardiff.bench.candidates import PEERS
    from lineardiff.bench.rows import crossovers, write_rows
    from lineardiff.bench.table import crossover_table, speed_table

    output.mkdir(parents=True, exist_ok=True)
    distributions = tuple(peer.distribution for peer in PEERS if peer.distribution)
    about = {
        "environment": environment(("lineardiff", "torch", "timm", *distributions)),
        "settings": settings,
    }
    print(machine_line(about["environment"]), flush=True)
    rows: list[Row] = []
    plotted = False
    levels = {candidate.level for candidate in candidates}
    per_level = len(shapes) * len(options["dtypes"]) * len(options["modes"])
    interrupted = False
    try:
        with tqdm(total=len(levels) * per_level, unit="group", desc=name) as bar:
            for group in attention.measure_attention(candidates, shapes, **options):
                rows += group
                write_rows(output / f"{name}.csv", rows)
                first = rows[-1]
                bar.set_postfix_str(f"N {first.N}, {first.mode}, {first.dtype}", refresh=False)
                bar.update()
    except KeyboardInterrupt:
        interrupted = True
    (output / f"{name}.json").write_text(
        json.dumps({**about, "crossovers": crossovers(rows)}, indent=1) + "\n"
    )
    if rows:
        print("\n" + f"{speed_table(rows)}\n\n{crossover_table(rows)}".rstrip())
        plotted = _plot(rows, output / f"{name}.png")
    if interrupted:
        raise KeyboardInterrupt(f"what was measured so far ({len(rows)} rows) is in {output / name}.csv")
    print(f"\nwritten: {output / name}.csv, .json" + (", .png" if plotted else ""))
    return rows


def _plot(rows: "Sequence[Row]", path: Path) -> bool:
    from lineardiff.bench import plot_attention_speed

    try:
        figure = plot_attention_speed(rows)
    except ValueError as reason:  # a single N
        print(f"\nno plot: {reason}")
        path.unlink(missing_ok=True)
        return False
    figure.savefig(path)
    return True


def machine_line(about: dict[str, Any]) -> str:
    """:func:`lineardiff.bench.machine` in one line."""
    memory = f", {about['memory_gib']} GiB" if about["memory_gib"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    gpus = "".join(f", {gpu}" for gpu in about["gpus"])
    cpu = f"{about['cpu']}, {about['cores']} cores ({about['capability']}){memory}{gpus}"
    return f"{cpu}; {about['threads']} threads; {versions}"


def _check(arguments: Bench) -> None:
    for name in ("batch_size", "heads", "head_dim", "contrast_tokens", "threads", "seconds"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be positive")
    if arguments.threads is not None and arguments.threads > 1024:
        raise ValueError(f"--threads is {arguments.threads}; give at most 1024")
    if arguments.device == "meta":
        raise ValueError("--device is meta, where nothing is computed; give cpu or a GPU")
    for name in ("sizes", "dtypes", "modes"):
        if not getattr(arguments, name):
            raise ValueError(f"--{name} is empty; give at least one")
    if min(arguments.sizes) < 1:
        raise ValueError(f"--sizes holds {min(arguments.sizes)}; an image has at least one token")
    if arguments.peers and arguments.level == "op":
        raise ValueError("the peers are layers, which project x themselves: add --level layer")
    if arguments.pooling and arguments.level == "layer":
        raise ValueError("a layer always pools: leave --pooling out, or choose --level op")


def _limits(arguments: Bench) -> "Limits":
    from lineardiff.bench import Limits

    if arguments.quick:
        seconds = arguments.seconds or 0.02
        return Limits(rounds=5, seconds=seconds, shape_seconds=2.0, call_seconds=2.5, total_seconds=100.0)
    return Limits(seconds=arguments.seconds or 0.1)


def _candidates(arguments: Bench) -> "list[Candidate]":
    from lineardiff.bench import layer_candidates, op_candidates

    backends = _backends(arguments.backends, quick=arguments.quick)
    if arguments.level == "op":
        return op_candidates(backends, pooling=arguments.pooling)
    return layer_candidates(backends, installed_peers(arguments.peers, say=print))


def _backends(names: Sequence[str] | None, *, quick: bool) -> tuple[str, ...]:
    from lineardiff.bench.candidates import runnable_backends
    from lineardiff.ops import BACKENDS
    from lineardiff.suggest import suggest

    if names is None:
        return tuple(name for name in runnable_backends() if not (quick and name == "reference"))
    known = {backend.name: backend for backend in BACKENDS}
    for name in names:
        if name not in known:
            raise ValueError(f"there is no backend {name!r}; {suggest(name, known)}")
        reason = known[name].why_not(None)
        if reason is not None:
            raise ValueError(f"backend {name!r} cannot run here: {reason}")
    return tuple(dict.fromkeys(names))


def installed_peers(names: Sequence[str] | None, *, say: Callable[[str], object]) -> tuple[str, ...]:
    """Names of the peers to measure: those asked for, or those installed; the others are said once.

    Raises:
        ValueError: One that is asked for is unknown or not installed.
    """
    from lineardiff.bench.candidates import PEERS
    from lineardiff.suggest import suggest

    known = {peer.name: peer for peer in PEERS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"there is no peer {name!r}; {suggest(name, known)}")
        if not known[name].installed:
            raise ValueError(f"peer {name!r} is not installed; pip install {known[name].distribution}")
    if names is not None:
        return tuple(dict.fromkeys(names))
    absent = [peer.distribution for peer in PEERS if not peer.installed and peer.distribution]
    if absent:
        say(f'left out, for they are not installed: {", ".join(absent)}; pip install "lineardiff[bench]"')
    return tuple(peer.name for peer in PEERS if peer.installed)
