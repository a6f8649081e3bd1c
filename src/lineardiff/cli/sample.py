"""``lineardiff sample``: generate images with a trained DiT or SiT."""

from collections.abc import Callable, Sequence
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
    """Generate images with a DiT or SiT, as numbered PNG files. Rerun an interrupted command to resume it.

    Image i depends on the seed and on i only, not on the batch size or the number of processes (except with ode-dopri5,
    whose steps depend on the batch). To generate 50,000 images for FID on 8 GPUs:
    torchrun --nproc-per-node 8 -m lineardiff sample MODEL --output DIR --npz FILE
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """Folder of a run, one of its checkpoints, folder of a saved pipeline, or a name on the Hugging Face hub."""
    output: Path
    """Output folder for 000000.png, ..., and settings.json."""
    labels: tuple[str, ...] = ()
    """Classes, as numbers or names, to cycle through; one image each unless --num-images or --per-class is given."""
    per_class: int | None = None
    """Number of images per class."""
    # torchrun would read --num as an abbreviation of one of its own options
    num_images: Annotated[int | None, tyro.conf.arg(aliases=("--num",))] = None
    """Number of images, of random classes unless --labels is given. Defaults to 50,000 if no other flag implies it."""
    steps: int | None = None
    """Number of sampling steps. Defaults to 250 for ddpm and sde-..., 50 for others."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 disables it."""
    guidance_channels: int | None = None
    """Number of leading channels to guide. Defaults to all; the DiT and SiT authors use 3."""
    guidance_interval: tuple[float, float] | None = None
    """Lowest and highest time at which to guide, in the network's times. Defaults to all times."""
    method: str | None = None
    """ddpm or ddim (diffusion); ode-euler, ode-midpoint, ode-heun, ode-dopri5, sde-euler or sde-heun (flow). Defaults
    to the pipeline's scheduler, or without one to ddpm or ode-heun."""
    vae: str | None = None
    """Autoencoder that decodes latents, a folder or hub name. Defaults to the pipeline's own."""
    seed: int = 0
    """Seed of the noise and of random classes."""
    batch_size: int = 32
    """Number of images per batch of each process."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """no (float32), or autocast to bf16 or fp16."""
    device: str | None = None
    """For example cpu or cuda:0. Defaults to the accelerator if there is one."""
    npz: Path | None = None
    """Also write all images to this npz file, in the format of ADM's evaluator."""
    grid: Path | None = None
    """Also write the first images as one picture to this PNG file, with a column per class."""


def run(words: Sequence[str]) -> None:
    arguments = parse(Sample, words, prog="lineardiff sample")
    _check(arguments)

    # imported here because it takes seconds, which --help and mistakes in flags need not wait for
    import torch

    from lineardiff.device import autocast
    from lineardiff.jobs import Job
    from lineardiff.pipelines import sample_folder

    pipeline, found = _open(arguments.model, vae=arguments.vae)
    plan = _plan(arguments, pipeline)
    settings = _settings(arguments, plan, weights=sample_folder.fingerprint_of(found))
    folder = arguments.output
    job = Job(folder, name=sample_folder.NAME, count=plan.num, settings=settings, device=arguments.device)
    pipeline.to(job.device).set_progress_bar_config(disable=True)

    def draw(labels: list[int], generators: list[torch.Generator]) -> list[Any]:
        with autocast(job.device, arguments.precision):
            return pipeline(
                labels,
                generator=generators,
                guidance_scale=arguments.guidance,
                guidance_channels=arguments.guidance_channels,
                guidance_interval=arguments.guidance_interval,
                num_inference_steps=arguments.steps,
                method=arguments.method,
            ).images

    def work(indices: list[int], progress: Callable[[int], None]) -> None:
        sample_folder.write_images(
            folder, plan, indices, draw, batch_size=arguments.batch_size, progress=progress
        )

    job.run(work, verb="sampling")
    if not job.is_main:
        return
    written = [f"{plan.num:,} images in {folder}"]
    for path, write in ((arguments.npz, sample_folder.write_npz), (arguments.grid, sample_folder.write_grid)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, folder, plan)
            written.append(str(path))
    print(f"wrote {', '.join(written)}")


def _open(model: str, *, vae: str | None) -> "tuple[LinearDiffPipeline, Path]":
    """Return the pipeline of a run, of a checkpoint, of a folder or of the hub, and where its weights are."""
    from lineardiff.pipelines.pretrained import find_pipeline, load_pipeline
    from lineardiff.runs import load_run

    try:
        run = load_run(model)
    except ValueError:  # no run
        found = find_pipeline(model)
        return load_pipeline(found, vae=vae), found
    return run.pipeline(vae=vae), run.pipeline_source


def _check(arguments: Sample) -> None:
    for flag, path, suffix in (("--npz", arguments.npz, ".npz"), ("--grid", arguments.grid, ".png")):
        if path is not None and path.suffix != suffix:
            raise ValueError(f"{flag} {path}; expected a name that ends in {suffix}.")
    if arguments.grid is not None and arguments.output.resolve() in arguments.grid.resolve().parents:
        raise ValueError(
            f"--grid {arguments.grid} is in the folder of the images, where it would count as one of them; choose "
            "another place."
        )
    if arguments.num_images is not None and arguments.per_class is not None:
        raise ValueError("--num-images and --per-class exclude each other; pass one of them.")
    for flag, number in (
        ("--num-images", arguments.num_images),
        ("--per-class", arguments.per_class),
        ("--batch-size", arguments.batch_size),
    ):
        if number is not None and number < 1:
            raise ValueError(f"{flag} {number}; expected at least 1.")
    if not 0 <= arguments.seed < 2**63:
        raise ValueError(f"--seed {arguments.seed}; expected a number from 0 to 2**63 - 1.")


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
    cycle = bool(arguments.labels) or arguments.per_class is not None
    return Plan(num, classes, cycle, arguments.seed)


def _label(text: str, names: Sequence[str], every: range) -> int:
    if text in names:
        return list(names).index(text)
    if text.isdecimal() and int(text) in every:
        return int(text)
    hint = f", or a name: {suggest(text, names)}" if names else ""
    raise ValueError(f"--labels {text}; expected a number from 0 to {every[-1]}{hint}")


def _settings(arguments: Sample, plan: "Plan", *, weights: str) -> dict[str, Any]:
    """Return everything that the images depend on."""
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
        "classes": list(plan.classes) if plan.cycle else "random",
        **{name: getattr(arguments, name) for name in names},
    }
