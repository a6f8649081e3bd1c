"""``lineardiff sample``: images of a trained generator, for a look or by the ten thousands for FID."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from lineardiff.cli.arguments import parse
from lineardiff.suggest import suggest

if TYPE_CHECKING:
    from lineardiff.pipelines.pipeline import LinearDiffPipeline
    from lineardiff.pipelines.sample_folder import Plan

DEFAULT_NUM = 50_000


@dataclass
class Sample:
    """Images of a DiT or SiT, as numbered PNGs. Repeat the command to go on where it stopped.

    Image i depends on the seed and on i alone: not on the batch size, and not on the number of processes, which
    torchrun starts (but for ode-dopri5, whose steps depend on the batch). 50,000 images for FID:
    torchrun --nproc-per-node 8 -m lineardiff sample MODEL --output DIR --npz FILE
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder of a finished run or of a saved pipeline, or a name on the Hugging Face hub."""
    output: Path
    """Folder of the images: 000000.png, ..., and settings.json."""
    labels: tuple[str, ...] = ()
    """Classes, as numbers or names: one image each, or as many as --num-images or --per-class says, in turn."""
    per_class: int | None = None
    """So many images of each class, in turn."""
    # not --num: torchrun takes that for the beginning of one of its own options
    num_images: Annotated[int | None, tyro.conf.arg(aliases=("--num",))] = None
    """So many images; without --labels of random classes. None: 50,000, if nothing else says how many."""
    steps: int | None = None
    """Steps of the sampler; None takes 250 for ddpm and sde-..., 50 for others."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 is none."""
    guidance_channels: int | None = None
    """How many channels are guided; None all, 3 as DiT's and SiT's authors."""
    guidance_interval: tuple[float, float] | None = None
    """Lowest and highest time of guidance, in the network's times; None is always."""
    method: str | None = None
    """ddpm or ddim (diffusion); ode-euler, ode-midpoint, ode-heun, ode-dopri5, sde-euler or sde-heun (flow). None: the
    scheduler saved with the pipeline, or without one ddpm or ode-heun."""
    vae: str | None = None
    """Autoencoder that makes images of latents, a folder or a hub name; None takes the pipeline's own."""
    seed: int = 0
    """Of noise and random classes."""
    batch_size: int = 32
    """Images made at once by each process."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """no (float32), or autocast to bf16 or fp16."""
    device: str | None = None
    """Such as cpu or cuda:0; None takes the accelerator if there is one."""
    npz: Path | None = None
    """Write all images to this npz file, too, as ADM's evaluator reads them."""
    grid: Path | None = None
    """Write the first images as one picture to this PNG file; classes in turn are its columns."""


def run(words: Sequence[str]) -> None:
    arguments = parse(Sample, words, prog="lineardiff sample")
    _check(arguments)

    # Here, because it takes seconds: help and mistakes in flags do not wait for it.
    import torch
    from tqdm import tqdm

    from lineardiff.device import autocast, join_processes
    from lineardiff.files import check_settings, write_settings
    from lineardiff.pipelines import sample_folder
    from lineardiff.pipelines.pretrained import find_pipeline, load_pipeline

    found = find_pipeline(arguments.model)
    pipeline = load_pipeline(found, vae=arguments.vae)
    plan = _plan(arguments, pipeline)
    settings = _settings(arguments, plan, weights=sample_folder.fingerprint_of(found))
    folder = arguments.output
    known = check_settings(folder, settings, pieces=sample_folder.PIECES)
    state, device = join_processes(arguments.device)
    if not known and state.is_main_process:
        write_settings(folder, settings)
    state.wait_for_everyone()

    pipeline.to(device).set_progress_bar_config(disable=True)

    def draw(labels: list[int], generators: list[torch.Generator]) -> list[Any]:
        with autocast(device, arguments.precision):
            return pipeline(
                labels,
                generator=generators,
                guidance_scale=arguments.guidance,
                guidance_channels=arguments.guidance_channels,
                guidance_interval=arguments.guidance_interval,
                num_inference_steps=arguments.steps,
                method=arguments.method,
            ).images

    rank, world_size = state.process_index, state.num_processes
    indices = sample_folder.missing(folder, plan, rank=rank, world_size=world_size)
    mine = len(range(rank, plan.num, world_size))
    bar = tqdm(
        total=mine,
        initial=mine - len(indices),
        unit="image",
        desc="sampling" if world_size == 1 else f"sampling (1 of {world_size} processes)",
        disable=not state.is_main_process,
    )
    with bar:
        try:
            sample_folder.write_images(
                folder, plan, indices, draw, batch_size=arguments.batch_size, progress=bar.update
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"repeat the command to go on in {folder}") from None
    state.wait_for_everyone()
    if not state.is_main_process:
        return
    written = [f"{plan.num:,} images in {folder}"]
    for path, write in ((arguments.npz, sample_folder.write_npz), (arguments.grid, sample_folder.write_grid)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, folder, plan)
            written.append(str(path))
    print(f"wrote {', '.join(written)}")


def _check(arguments: Sample) -> None:
    for flag, path, suffix in (("--npz", arguments.npz, ".npz"), ("--grid", arguments.grid, ".png")):
        if path is not None and path.suffix != suffix:
            raise ValueError(f"{flag} {path}: expected a name that ends in {suffix}")
    if arguments.grid is not None and arguments.output.resolve() in arguments.grid.resolve().parents:
        raise ValueError(
            f"--grid {arguments.grid} is in the folder of the images, where it would count as one of them; choose "
            "another place"
        )
    if arguments.num_images is not None and arguments.per_class is not None:
        raise ValueError("--num-images and --per-class both say how many images; give one of them")
    for flag, number in (
        ("--num-images", arguments.num_images),
        ("--per-class", arguments.per_class),
        ("--batch-size", arguments.batch_size),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{flag} {number}: expected at least 1")
    if not 0 <= arguments.seed < 2**63:
        raise ValueError(f"--seed {arguments.seed}: expected 0 or more")


def _plan(arguments: Sample, pipeline: "LinearDiffPipeline") -> "Plan":
    from lineardiff.pipelines.sample_folder import Plan

    names = pipeline.class_names or []
    every = range(pipeline.transformer.config.num_classes)
    classes = [_label(text, names, every) for text in arguments.labels] or list(every)
    num = arguments.num_images
    if arguments.per_class is not None:
        num = arguments.per_class * len(classes)
    elif num is None:
        num = len(classes) if arguments.labels else DEFAULT_NUM
    in_turn = bool(arguments.labels) or arguments.per_class is not None
    return Plan(num, classes, in_turn, arguments.seed)


def _label(text: str, names: Sequence[str], every: range) -> int:
    if text in names:
        return list(names).index(text)
    if text.isdecimal() and int(text) in every:
        return int(text)
    hint = f", or a name: {suggest(text, names)}" if names else ""
    raise ValueError(f"--labels {text}: expected a number from 0 to {every[-1]}{hint}")


def _settings(arguments: Sample, plan: "Plan", *, weights: str) -> dict[str, Any]:
    """What the images depend on."""
    names = (
        "steps",
        "guidance",
        "guidance_channels",
        "guidance_interval",
        "method",
        "vae",
        "seed",
        "precision",
    )
    return {
        "weights": weights,
        "num": plan.num,
        "classes": list(plan.classes) if plan.in_turn else "random",
        **{name: getattr(arguments, name) for name in names},
    }
