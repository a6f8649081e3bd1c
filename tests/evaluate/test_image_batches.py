from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lineardiff.data import center_crop, open_images
from lineardiff.evaluate.image_batches import TensorBatches, open_batches, save_samples


def pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def fill(folder: Path, images: np.ndarray) -> Path:
    """Write images in sub-folders, in the order of their paths."""
    for i, image in enumerate(images):
        file = folder / f"class {i // 3}" / f"{i:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return folder


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
@pytest.mark.parametrize("compressed", [True, False])
def test_an_npz_is_read_in_batches(tmp_path: Path, batch_size: int, compressed: bool) -> None:
    images = pixels(7, 5, 6, 3)
    (np.savez_compressed if compressed else np.savez)(tmp_path / "s.npz", images)
    batches = open_batches(tmp_path / "s.npz", batch_size=batch_size)
    assert (batches.images, batches.size, batches.source) == (7, (5, 6), str(tmp_path / "s.npz"))
    for _ in range(2):
        found = list(batches)
        assert [len(batch) for batch in found[:-1]] == [batch_size] * (len(found) - 1)
        assert np.array_equal(torch.cat(found).permute(0, 2, 3, 1), images)


@pytest.mark.parametrize("shape", [(4, 5, 6), (4, 5, 6, 1)])
def test_grey_is_repeated(tmp_path: Path, shape: tuple[int, ...]) -> None:
    images = pixels(*shape)
    np.savez(tmp_path / "s.npz", images)
    found = torch.cat(list(open_batches(tmp_path / "s.npz"))).numpy()
    assert found.shape == (4, 3, 5, 6)
    assert all(np.array_equal(found[:, channel], images.reshape(4, 5, 6)) for channel in range(3))


def test_saved_samples_are_what_adms_evaluator_reads(tmp_path: Path) -> None:
    images = torch.from_numpy(pixels(5, 3, 4, 6))
    save_samples(tmp_path / "s.npz", images)
    with np.load(tmp_path / "s.npz", allow_pickle=False) as file:
        assert file.files == ["arr_0"]
        stored = file["arr_0"]
    assert (stored.dtype, stored.shape, stored.flags.c_contiguous) == (np.uint8, (5, 4, 6, 3), True)
    assert np.array_equal(stored, images.numpy().transpose(0, 2, 3, 1))
    assert torch.equal(torch.cat(list(open_batches(tmp_path / "s.npz", batch_size=2))), images)
    assert torch.equal(torch.cat(list(TensorBatches(images, batch_size=2))), images)
    for bad, message in [(images.float(), "torch.float32"), (images[0], r"expected \(B, 3, H, W\)")]:
        with pytest.raises(ValueError, match=message):
            save_samples(tmp_path / "t.npz", bad)
    with pytest.raises(ValueError, match="ends in .npz"):
        save_samples(tmp_path / "samples", images)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_folder_is_read_with_its_sub_folders(tmp_path: Path, workers: int) -> None:
    images = pixels(7, 5, 6, 3)
    batches = open_batches(fill(tmp_path, images), batch_size=4, workers=workers)
    assert (batches.images, batches.size) == (7, (5, 6))
    assert np.array_equal(torch.cat(list(batches)).permute(0, 2, 3, 1), images)


def test_the_embedded_images_are_those_of_training() -> None:
    batches = open_batches("fashion", batch_size=100)
    assert (batches.images, batches.size) == (10_000, (28, 28))
    first = next(iter(batches))
    split = open_images("fashion", "train")
    assert np.array_equal(first[7].permute(1, 2, 0), np.asarray(split[7][0]))
    assert next(iter(open_batches("fashion", image_size=32))).shape == (64, 3, 32, 32)


def test_the_crop_keeps_the_middle(tmp_path: Path) -> None:
    # 40 x 20 with a border that the crop must drop; halved once by the box filter, then resized
    image = np.zeros((20, 40, 3), dtype=np.uint8)
    image[:, 10:30] = 200
    assert (np.asarray(center_crop(Image.fromarray(image), 20)) == 200).all()
    assert (np.asarray(center_crop(Image.fromarray(image), 10)) == 200).all()
    tall = center_crop(Image.fromarray(pixels(75, 50, 3)), 16)
    assert tall.size == (16, 16)
    # one halving is the mean over 2 x 2 pixels, rounded for rows and then for columns
    noise = pixels(32, 32, 3)
    means = noise.reshape(16, 2, 16, 2, 3).mean((1, 3))
    assert np.abs(np.asarray(center_crop(Image.fromarray(noise), 16)) - means).max() <= 1
    fill(tmp_path, pixels(3, 20, 40, 3))
    assert open_batches(tmp_path, image_size=16).size == (16, 16)


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    def saved(name: str, array: np.ndarray) -> Path:
        np.savez(tmp_path / name, array)
        return tmp_path / name

    (tmp_path / "empty").mkdir()
    (tmp_path / "text.npz").write_text("no npz")
    np.savez(tmp_path / "names.npz", images=pixels(2, 4, 4, 3))
    fine = saved("fine.npz", pixels(2, 4, 4, 3))
    for source, message in [
        (tmp_path / "none", "does not exist"),
        (tmp_path / "empty", "holds no images"),
        (tmp_path / "text.npz", "cannot be read as an npz file"),
        (tmp_path / "names.npz", "holds images; expected images, an array arr_0"),
        (saved("float.npz", np.full((2, 4, 4, 3), np.nan)), "float64.*expected uint8"),
        (saved("nchw.npz", pixels(2, 3, 4, 4)), r"\(2, 3, 4, 4\)"),
        (saved("one.npz", pixels(4, 4)), r"\(4, 4\)"),
        (saved("fortran.npz", np.asfortranarray(pixels(2, 4, 4, 3))), "Fortran"),
        (saved("zero.npz", pixels(0, 4, 4, 3)), "holds no images"),
        (saved("object.npz", np.array([{}, {}])), "object"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_batches(source)
    with pytest.raises(ValueError, match="4 x 4 and image_size is 8"):
        open_batches(fine, image_size=8)
    for arguments in ({"batch_size": 0}, {"image_size": 0}):
        with pytest.raises(ValueError, match="at least 1 image and 2 pixels"):
            open_batches(fine, **arguments)


def test_an_image_of_another_size_or_no_image_is_named(tmp_path: Path) -> None:
    fill(tmp_path, pixels(4, 6, 6, 3))
    odd = tmp_path / "class 1" / "odd.png"
    Image.new("RGB", (8, 6)).save(odd)
    with pytest.raises(ValueError, match=r"odd\.png has 6 x 8 pixels, the first image 6 x 6.*image_size"):
        list(open_batches(tmp_path))
    assert len(torch.cat(list(open_batches(tmp_path, image_size=6)))) == 5
    odd.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"odd\.png cannot be decoded"):
        list(open_batches(tmp_path))
