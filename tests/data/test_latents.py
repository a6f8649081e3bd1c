"""Latents on disk against the autoencoder asked directly."""

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms.functional import hflip, pil_to_tensor

from lineardiff.data import EpochBatches, ImageSplit, open_images
from lineardiff.data.latents import (
    Latents,
    open_latents,
    sample_moments,
    shard_count,
    write_index,
    write_latents,
)

diffusers = pytest.importorskip("diffusers")

from lineardiff.pipelines.autoencoder import encode_moments  # noqa: E402


@pytest.fixture(scope="module")
def vae() -> "diffusers.AutoencoderKL":
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4).eval()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> ImageSplit:
    folder = tmp_path_factory.mktemp("images")
    for i in range(7):
        path = folder / "train" / ("cat", "dog")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return open_images(folder, "train")


def write(split: ImageSplit, folder: Path, vae: object, **options: object) -> None:
    folder.mkdir(exist_ok=True)
    write_latents(
        split,
        folder,
        **{
            "shards": range(3),
            "encode": partial(encode_moments, vae),
            "transform": pil_to_tensor,
            "shard_size": 3,
            "batch_size": 2,
            **options,
        },
    )


def finish(split: ImageSplit, folder: Path) -> Latents:
    write_index(split, folder, shards=shard_count(len(split), shard_size=3), settings={"vae": "tiny"})
    return open_latents(folder)


def test_moments_are_those_of_the_image_and_of_its_mirror_image(
    images: ImageSplit, vae: "diffusers.AutoencoderKL", tmp_path: Path
) -> None:
    write(images, tmp_path, vae)
    latents = finish(images, tmp_path)
    assert (len(latents), latents.classes, latents.split) == (7, ("cat", "dog"), "train")
    assert latents.source == images.source
    assert latents.settings == {"vae": "tiny"}
    for i in range(len(images)):
        image, label = images[i]
        for mirrored in (False, True):
            pixels = pil_to_tensor(hflip(image) if mirrored else image)[None] / 127.5 - 1
            with torch.no_grad():
                posterior = vae.encode(pixels).latent_dist
            moments = latents.moments(i, mirrored=mirrored)
            torch.testing.assert_close(moments, torch.cat([posterior.mean, posterior.logvar], 1)[0])
            noise = torch.randn(4, 8, 8)
            torch.testing.assert_close(
                sample_moments(moments, noise), (posterior.mean + posterior.std * noise)[0]
            )
        assert latents[i, 0][1] == label == latents.labels[i]


def test_extreme_variances_are_clamped() -> None:
    moments = torch.tensor([1.0, 1.0, -50.0, 50.0]).reshape(1, 4, 1, 1)
    drawn = sample_moments(moments, torch.ones(1, 2, 1, 1)).flatten()
    torch.testing.assert_close(drawn, 1 + torch.tensor([-15.0, 10.0]).exp())


def test_the_sample_seed_chooses_the_image_or_its_mirror_image(
    images: ImageSplit, vae: "diffusers.AutoencoderKL", tmp_path: Path
) -> None:
    write(images, tmp_path, vae)
    latents = finish(images, tmp_path)
    plain, mirrored = (latents.moments(4, mirrored=m) for m in (False, True))
    assert not torch.equal(plain, mirrored)
    chosen = [torch.equal(latents[4, seed][0], mirrored) for seed in range(400)]
    assert [torch.equal(latents[4, seed][0], mirrored) for seed in range(400)] == chosen
    assert all(torch.equal(latents[4, seed][0], plain) for seed in range(400) if not chosen[seed])
    assert 160 < sum(chosen) < 240  # 4 standard deviations

    batches = EpochBatches(7, batch_size=3, total_steps=4, seed=1)
    here, there = (
        list(DataLoader(latents, batch_sampler=batches, num_workers=workers)) for workers in (0, 2)
    )
    for (a, x), (b, y), keys in zip(here, there, batches, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(x, y)
        assert x.tolist() == [int(latents.labels[index]) for index, _ in keys]
    assert here[0][0].shape == (3, 8, 8, 8)
    assert torch.equal(pickle.loads(pickle.dumps(latents))[4, 7][0], latents[4, 7][0])


def test_a_shard_is_the_same_whatever_else_is_written(
    images: ImageSplit, vae: "diffusers.AutoencoderKL", tmp_path: Path
) -> None:
    write(images, tmp_path / "one", vae)
    seen: list[int] = []
    for shards in ([1], [2, 0]):
        write(images, tmp_path / "two", vae, shards=shards, progress=seen.append)
    assert seen == [2, 1, 1, 2, 1]
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == [f"shard-0000{i}.safetensors" for i in range(3)]
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_half_precision_and_bad_images(
    images: ImageSplit, vae: "diffusers.AutoencoderKL", tmp_path: Path
) -> None:
    write(images, tmp_path / "whole", vae)
    write(images, tmp_path / "half", vae, dtype=torch.float16)
    whole, half = finish(images, tmp_path / "whole"), finish(images, tmp_path / "half")
    assert half[0, 0][0].dtype == torch.float32
    torch.testing.assert_close(half[5, 0][0], whole[5, 0][0], rtol=1e-3, atol=1e-3)

    class Torn(ImageSplit):
        def __init__(self) -> None:
            self.__dict__.update(images.__dict__)

        def __getitem__(self, index: int) -> tuple[Image.Image, int] | None:
            return None if index in (1, 6) else images[index]

    with pytest.raises(ValueError, match="none of the images 6 to 6"):
        write(Torn(), tmp_path / "torn", vae)
    (tmp_path / "torn" / "shard-00002.safetensors").symlink_to(tmp_path / "whole" / "shard-00002.safetensors")
    torn = finish(Torn(), tmp_path / "torn")
    assert len(torn) == 6
    for i, j in enumerate((0, 2, 3, 4, 5, 6)):
        torch.testing.assert_close(torn.moments(i), whole.moments(j))
        assert torn.labels[i] == whole.labels[j]


def _index(change: Callable[[dict], object], folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def test_folders_that_are_missing_unfinished_or_damaged(
    images: ImageSplit, vae: "diffusers.AutoencoderKL", tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"holds no index.json.*lineardiff latents"):
        open_latents(tmp_path / "none")
    write(images, tmp_path, vae, shards=[1])
    with pytest.raises(ValueError, match=r"shard-00000.safetensors is missing"):
        finish(images, tmp_path)
    with pytest.raises(ValueError, match=r"not finished"):
        open_latents(tmp_path)
    write(images, tmp_path, vae)
    latents = finish(images, tmp_path)
    for index in (-1, 7):
        with pytest.raises(IndexError, match=f"index {index} is out of range; expected 0 to 6"):
            latents.moments(index)
    _index(lambda index: index["shards"][2].update(images=4), tmp_path)
    with pytest.raises(ValueError, match=r"shard-00002.safetensors holds 1 images"):
        open_latents(tmp_path)
    _index(lambda index: index.pop("shards"), tmp_path)
    with pytest.raises(ValueError, match=r"index.json is damaged"):
        open_latents(tmp_path)
    finish(images, tmp_path)
    shard = tmp_path / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"shard-00001.safetensors is damaged"):
        open_latents(tmp_path)
    with pytest.raises(ValueError, match="shard_size=0"):
        shard_count(7, shard_size=0)
