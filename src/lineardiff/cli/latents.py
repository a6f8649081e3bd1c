"""``lineardiff latents``: encode images once, so that generators train on their latents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from lineardiff.cli.arguments import parse


@dataclass
class WriteLatents:
    """The latents of images and of their mirror images, as safetensors shards that `lineardiff train` reads.

    Repeat the command to go on where it stopped. Several processes, which torchrun starts, share the work:
    torchrun --nproc-per-node 8 -m lineardiff latents IMAGES --vae stabilityai/sd-vae-ft-ema --output DIR
    """

    images: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="IMAGES")]
    """A folder train/<class>/*.jpg, a folder of parquet files, or a dataset on the Hugging Face hub."""
    vae: str
    """AutoencoderKL of diffusers: a folder, or a name on the hub such as stabilityai/sd-vae-ft-ema."""
    output: Path
    """Folder of the latents."""
    split: Literal["train", "validation"] = "train"
    """Which images of the data."""
    size: int = 256
    """Side of the square that is cut from the middle of each image, as ADM does; latents have an eighth of it."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """What a file that is no image does: stop with its name, or be left out."""
    dtype: Literal["float32", "float16"] = "float32"
    """Of the numbers on disk: ImageNet at 256 pixels takes 84 GB in float32, half of it in float16."""
    shard_size: int = 4096
    """Images of one file, the piece of work that is not redone."""
    batch_size: int = 32
    """Images encoded at once by each process."""
    workers: int = 2
    """Processes that load images, for each that encodes; 0 loads in the same."""
    device: str | None = None
    """Such as cpu or cuda:0; None takes the accelerator if there is one."""


def run(words: Sequence[str]) -> None:
    arguments = parse(WriteLatents, words, prog="lineardiff latents")
    for flag, number in (("--shard-size", arguments.shard_size), ("--batch-size", arguments.batch_size)):
        if number < 1:
            raise ValueError(f"{flag} {number}: expected at least 1")

    # Here, because it takes seconds: help and mistakes in flags do not wait for it.
    import torch
    from torchvision import transforms
    from tqdm import tqdm

    from lineardiff import data
    from lineardiff.data import center_crop, open_images
    from lineardiff.data.latents import encode_moments, shard_count, write_index, write_latents
    from lineardiff.device import join_processes
    from lineardiff.files import check_settings, write_settings
    from lineardiff.pipelines import autoencoder
    from lineardiff.pipelines.pretrained import load_vae

    split = open_images(arguments.images, arguments.split, bad_images=arguments.bad_images)
    vae = load_vae(arguments.vae)
    names = ("images", "vae", "split", "size", "bad_images", "dtype", "shard_size")
    settings = {
        **{name: getattr(arguments, name) for name in names},
        "number_of_images": len(split),
        "fingerprint_of_images": data.latents.fingerprint_of(split),
        "fingerprint_of_vae": autoencoder.fingerprint_of(vae),
    }
    folder = arguments.output
    known = check_settings(folder, settings, pieces="shard-*[0-9].safetensors")
    factor = 2 ** (len(vae.config.block_out_channels) - 1)
    if arguments.size < factor or arguments.size % factor:
        raise ValueError(
            f"--size {arguments.size}: expected a multiple of {factor}, by which the VAE divides"
        )

    state, device = join_processes(arguments.device)
    if not known and state.is_main_process:
        write_settings(folder, settings)
    state.wait_for_everyone()
    shards = shard_count(len(split), shard_size=arguments.shard_size)
    rank, world_size = state.process_index, state.num_processes
    mine = range(rank, shards, world_size)
    images = sum(min(arguments.shard_size, len(split) - shard * arguments.shard_size) for shard in mine)
    with tqdm(
        total=images,
        unit="image",
        desc="encoding" if world_size == 1 else f"encoding (1 of {world_size} processes)",
        disable=not state.is_main_process,
    ) as bar:

        def progress(count: int, there: bool) -> None:
            if there:
                bar.initial += count  # so that the rate is that of the work
            bar.update(count)

        try:
            write_latents(
                split,
                folder,
                encode=partial(encode_moments, vae.to(device)),
                transform=transforms.Compose(
                    [partial(center_crop, image_size=arguments.size), transforms.PILToTensor()]
                ),
                shard_size=arguments.shard_size,
                batch_size=arguments.batch_size,
                workers=arguments.workers,
                dtype=getattr(torch, arguments.dtype),
                rank=rank,
                world_size=world_size,
                progress=progress,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"repeat the command to go on in {folder}") from None
    state.wait_for_everyone()
    if state.is_main_process:
        write_index(split, folder, shards=shards, settings=settings)
        print(f"wrote {folder}; train on it with --data {folder}")
