"""Speed and peak memory of networks: classifiers of timm's registry, and DiT and SiT."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lineardiff import ops
from lineardiff.bench.memory import CallFailed, can_measure, in_one_line, peak_memory
from lineardiff.bench.rows import MEASURED, Mode, Row
from lineardiff.bench.timing import interleaved
from lineardiff.models import DIT_CONFIGS, create_dit
from lineardiff.suggest import suggest

__all__ = ["PAPER_GENERATORS", "PAPER_MODELS", "Speed", "build", "images_per_second", "measure_networks"]

NetworkLevel = Literal["model", "generator"]

PAPER_MODELS = (
    ("deit_tiny_patch16_224", "vca_deit_tiny_patch16_224"),
    ("pvt_v1_tiny", "vca_pvt_tiny"),
    ("swin_tiny_patch4_window7_224", "vca_swin_tiny_patch4_224"),
    ("cswin_tiny_24181_224", "vca_cswin_tiny_224"),
)
PAPER_GENERATORS = (("dit_s_2", "vca_dit_s_2"), ("sit_s_2", "vca_sit_s_2"))

log = logging.getLogger("lineardiff")


@dataclass(frozen=True)
class Speed:
    """Images per second over the rounds of one measurement."""

    median: float
    low: float
    """First quartile of the rounds."""
    high: float
    """Third quartile of the rounds."""
    rounds: int
    mode: Mode
    batch_size: int
    threads: int
    """Threads of PyTorch on the CPU."""
    device: str


def images_per_second(
    models: Mapping[str, nn.Module],
    *,
    image_size: int | tuple[int, int],
    batch_size: int,
    mode: Mode = "forward",
    in_chans: int = 3,
    rounds: int = 9,
    seconds: float = 0.3,
) -> dict[str, Speed]:
    """Measure classifiers in interleaved rounds, so that a disturbance of the machine affects all of them.

    A copy of each model runs on the device and in the precision of its parameters, on random images.

    Args:
        models: Models by name. Each maps images (batch_size, in_chans, height, width) to logits (batch_size, classes).
        image_size: Pixels per side, or (height, width).
        batch_size: Images per call.
        mode: "forward" is a forward pass without gradients; "train" is a training step: forward, cross-entropy,
            backward, AdamW.
        in_chans: Channels of the images.
        rounds: Measurements of each model; every other round reverses the order of the models.
        seconds: Approximate duration of one measurement.

    Returns:
        The speed of each model.

    Raises:
        ValueError: There is no model, or there are fewer than two rounds.
    """
    if not models:
        raise ValueError("images_per_second got no models; pass at least one.")
    size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    devices = {name: next(model.parameters()).device for name, model in models.items()}
    calls = {}
    for name, model in models.items():
        twin = copy.deepcopy(model).train(mode == "train")
        images = _random(batch_size, in_chans, *size).to(next(twin.parameters()))
        calls[name] = _call(twin, (images,), mode)
    timings = interleaved(calls, rounds=rounds, seconds=seconds, devices=devices.values())
    return {
        name: Speed(
            median=batch_size / timing.median,
            low=batch_size / timing.high,
            high=batch_size / timing.low,
            rounds=timing.rounds,
            mode=mode,
            batch_size=batch_size,
            threads=torch.get_num_threads(),
            device=str(devices[name]),
        )
        for name, timing in timings.items()
    }


class _Setting(NamedTuple):
    """What is interleaved at one size, type and mode."""

    name: str
    B: int
    threads: int


def measure_networks(
    names: Sequence[str],
    *,
    level: NetworkLevel,
    sizes: Sequence[int],
    batch_sizes: Sequence[int] = (1, 8),
    threads: Sequence[int] | None = None,
    modes: Sequence[Mode] = ("forward",),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    device: torch.device | None = None,
    rounds: int = 9,
    seconds: float = 0.3,
    compiled: bool = False,
    memory: bool = True,
) -> Iterator[list[Row]]:
    """Measure networks side by side at each size, type and mode.

    All networks, batch sizes and numbers of threads take part in one interleaved run: latency at batch 1 and
    throughput at larger batches, on one thread and on all. `ratio` compares with the first network.

    Args:
        names: Names of timm's registry ("model") or of :data:`lineardiff.models.DIT_CONFIGS` ("generator").
        level: Kind of the networks.
        sizes: Sides of the images in pixels ("model") or of the latents ("generator").
        batch_sizes: Images per call.
        threads: Numbers of threads; None takes PyTorch's current number.
        modes: "forward" is a forward pass without gradients, which for a generator is one sampling step without
            guidance. "train" is a training step: forward, loss, backward, AdamW.
        dtypes: Types of weights and inputs.
        device: None selects the CPU.
        rounds: Measurements of each setting.
        seconds: Approximate duration of one measurement.
        compiled: Compile all networks with `torch.compile`. Their peak memory is not measured.
        memory: Also measure peak memory on the CPU under Linux: how far a fresh process rises above weights and
            inputs. For "train" it includes gradients but no optimizer state.

    Returns:
        An iterator over the rows of one size, type and mode, which measures as it goes.

    Raises:
        ValueError: A name is unknown, or a network does not take a size; raised before anything is measured.
    """
    device = device or torch.device("cpu")
    if memory and (compiled or not (can_measure(device) and device.type == "cpu")):
        log.info(
            "Peak memory is measured without --compile on the CPU of Linux only; its column stays empty."
        )
        memory = False
    for name in names:
        for size in sizes:
            _check(name, level, size)
    group = partial(
        _group,
        names,
        level,
        batch_sizes=batch_sizes,
        threads=threads or [torch.get_num_threads()],
        device=device,
        rounds=rounds,
        seconds=seconds,
        compiled=compiled,
        memory=memory,
    )
    return (group(size, dtype, mode) for size in sizes for dtype in dtypes for mode in modes)


def _group(
    names: Sequence[str],
    level: NetworkLevel,
    size: int,
    dtype: torch.dtype,
    mode: Mode,
    *,
    batch_sizes: Sequence[int],
    threads: Sequence[int],
    device: torch.device,
    rounds: int,
    seconds: float,
    compiled: bool,
    memory: bool,
) -> list[Row]:
    default = torch.get_num_threads()
    calls: dict[_Setting, Callable[[], object]] = {}
    for name in names:
        network = build(name, level, size, dtype).to(device).train(mode == "train")
        for B in batch_sizes:
            call = _call(network, _inputs(level, B, size, dtype, device), mode, compiled=compiled)
            calls |= {_Setting(name, B, count): call for count in threads}
    # PyTorch specialises compiled code on the threads, and would run more than 8 variants uncompiled, silently.
    limit = torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
    try:
        with limit if compiled else nullcontext():
            timings = interleaved(
                calls,
                rounds=rounds,
                seconds=seconds,
                devices=[device],
                before=lambda setting: torch.set_num_threads(setting.threads),
            )
    finally:
        torch.set_num_threads(default)
    calls.clear()  # frees the networks before those of the memory measurement are built
    peaks: dict[tuple[str, int], int | None] = {}
    for name in names if memory else ():
        for B in batch_sizes:
            try:
                peaks[name, B] = peak_memory(
                    partial(_prepare, name, level, size, B, mode, dtype), device=device
                )
            except CallFailed as error:
                log.warning("The peak memory of %s is unknown: %s.", name, error)
    return [
        Row(
            level=level,
            mode=mode,
            dtype=str(dtype).removeprefix("torch."),
            threads=at.threads,
            B=at.B,
            size=size,
            N=(size // DIT_CONFIGS[at.name]["patch_size"]) ** 2 if level == "generator" else None,
            candidate=f"{at.name}, compiled" if compiled else at.name,
            ratio=timings[at._replace(name=names[0])].median / timing.median,
            ratio_status=MEASURED,
        ).timed(timing, peak=peaks.get((at.name, at.B)))
        for at, timing in timings.items()
    ]


def build(name: str, level: NetworkLevel, size: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return an untrained network for a size, with weights from seed 0, in evaluation mode.

    Raises:
        ValueError: The name is unknown or the network does not take the size.
    """
    torch.manual_seed(0)
    if level == "generator":
        return create_dit(name, sample_size=size).to(dtype).eval()
    if not timm.is_model(name):
        raise ValueError(f"There is no model {name!r}; {suggest(name, timm.list_models())}")
    try:
        model = timm.create_model(name, img_size=size)
    except TypeError:  # it has no fixed size
        model = timm.create_model(name)
    return model.to(dtype).eval()


def _check(name: str, level: NetworkLevel, size: int) -> None:
    """Raise ValueError unless the network exists and takes the size, without computing anything."""
    try:
        with torch.device("meta"), torch.no_grad(), ops.backend("auto"):
            network = build(name, level, size)
            network(*_inputs(level, 1, size, torch.float32, torch.device("meta")))
    except NotImplementedError:  # an operation that the meta device lacks
        return
    except (AssertionError, RuntimeError, ValueError) as error:
        if isinstance(error, ValueError) and "There is no" in str(error):
            raise
        what = "images" if level == "model" else "latents"
        raise ValueError(f"{name} does not take {what} of size {size}: {in_one_line(error)}") from error


def _prepare(
    name: str, level: NetworkLevel, size: int, B: int, mode: Mode, dtype: torch.dtype
) -> Callable[[], object]:
    network = build(name, level, size, dtype).train(mode == "train")
    return _call(network, _inputs(level, B, size, dtype, torch.device("cpu")), mode, optimize=False)


def _inputs(
    level: NetworkLevel, B: int, size: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, ...]:
    if level == "model":
        return (_random(B, 3, size, size).to(device, dtype),)
    t, y = _random(B).to(device), torch.arange(B) % 1000
    return _random(B, 4, size, size).to(device, dtype), t, y.to(device)


def _random(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu")


def _call(
    network: nn.Module,
    inputs: tuple[Tensor, ...],
    mode: Mode,
    *,
    compiled: bool = False,
    optimize: bool = True,
) -> Callable[[], object]:
    """Return a forward pass without gradients, or a training step."""
    forward = torch.compile(network, dynamic=False) if compiled else network
    if mode == "forward":
        return torch.inference_mode()(lambda: forward(*inputs))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-6)
    labels = torch.zeros(len(inputs[0]), dtype=torch.long, device=inputs[0].device)

    def train_step() -> None:
        optimizer.zero_grad(set_to_none=True)
        output = forward(*inputs)
        if isinstance(output, Tensor):
            F.cross_entropy(output, labels).backward()
        else:  # a generator of images
            output.sample.float().square().mean().backward()
        if optimize:
            optimizer.step()

    return train_step
