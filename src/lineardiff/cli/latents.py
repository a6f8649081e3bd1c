"""``lineardiff latents``: encode images once, to train on their latents."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lineardiff.cli.arguments import parse


@dataclass
class WriteLatents:
    """Encode images and their mirror images to latents that `lineardiff train` reads, as safetensors shards.

    Rerun an interrupted command to resume it. To share the work between 8 GPUs:
    torchrun --nproc-per-node 8 -m lineardiff latents IMAGES --vae stabilityai/sd-vae-ft-ema --output DIR
    """

    images: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="IMAGES")]
    """A folder train/<class>/*.jpg, a folder of parquet files, or a dataset on the Hugging Face hub."""
    vae: str
    """AutoencoderKL of diffusers: a folder, or a name on the hub such as stabilityai/sd-vae-ft-ema."""
    output: Path
    """Output folder."""
    split: Literal["train", "validation"] = "train"
    """Split of the data to encode."""
    size: int = 256
    """Side of the square images after ADM's centre crop; a multiple of the VAE's downsampling factor."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """Whether to stop at an image that cannot be decoded, or to skip it."""
    dtype: Literal["float32", "float16"] = "float32"
    """Type of the numbers on disk. ImageNet at 256 pixels takes 84 GB in float32."""
    shard_size: int = 4096
    """Number of images per file, the unit of work that is not repeated."""
    batch_size: int = 32
    """Number of images per batch of each process."""
    workers: int = 2
    """Number of loader processes per encoding process; 0 loads images in the encoding process."""
    device: str | None = None
    """For example cpu or cuda:0. Defaults to the accelerator if there is one."""


def run(words: Sequence[str]) -> None:
    arguments = parse(WriteLatents, words, prog="lineardiff latents")
    for flag, number in (
        ("--shard-size", arguments.shard_size),
        ("--batch-size", arguments.batch_size),
        ("--size", arguments.size),
    ):
        if number < 1:
            raise ValueError(f"{flag} {number}; expected at least 1.")
    if arguments.workers < 0:
        raise ValueError(f"--workers {arguments.workers}; expected at least 0.")

    # imported here because it takes seconds, which --help and mistakes in flags need not wait for
    import torch
    from torchvision import transforms

    from lineardiff.data import center_crop, latents, open_images
    from lineardiff.jobs import Job
    from lineardiff.pipelines import autoencoder
    from lineardiff.pipelines.pretrained import load_vae

    split = open_images(arguments.images, arguments.split, bad_images=arguments.bad_images)
    vae = load_vae(arguments.vae)
    space = autoencoder.LatentSpace.of(vae)
    if arguments.size % space.downsampling:
        raise ValueError(
            f"--size {arguments.size}; expected a multiple of {space.downsampling}, the VAE's downsampling factor."
        )
    names = ("images", "vae", "split", "size", "bad_images", "dtype", "shard_size")
    settings = {
        **{name: getattr(arguments, name) for name in names},
        "number_of_images": len(split),
        "fingerprint_of_images": latents.fingerprint_of(split),
        "fingerprint_of_vae": autoencoder.fingerprint_of(vae),
        "latent_space": asdict(space),
    }
    folder, shard_size = arguments.output, arguments.shard_size
    shards = latents.shard_count(len(split), shard_size=shard_size)
    job = Job(folder, name=latents.NAME, count=shards, settings=settings, device=arguments.device)

    def work(indices: list[int], progress: Callable[[int], None]) -> None:
        latents.write_latents(
            split,
            folder,
            indices,
            encode=partial(autoencoder.encode_moments, vae.to(job.device)),
            transform=transforms.Compose(
                [partial(center_crop, image_size=arguments.size), transforms.PILToTensor()]
            ),
            shard_size=shard_size,
            batch_size=arguments.batch_size,
            workers=arguments.workers,
            dtype=getattr(torch, arguments.dtype),
            progress=progress,
        )

    job.run(work, verb="encoding", size=lambda shard: min(shard_size, len(split) - shard * shard_size))
    if job.is_main:
        latents.write_index(split, folder, shards=shards, settings=settings)
        print(f"wrote {folder}; train on it with --data {folder}")
