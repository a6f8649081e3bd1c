import logging
import pickle
import warnings
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from lineardiff.data import check_same_classes, eval_transform, open_images, subset, train_transform


def pixels(split, index):
    return np.asarray(split[index][0])


@pytest.mark.parametrize(("split", "per_class"), [("train", 1000), ("validation", 200)])
def test_embedded_images_are_balanced_and_rgb(split, per_class):
    images = open_images("fashion", split)
    assert (images.source, images.split, len(images)) == ("fashion", split, 10 * per_class)
    assert images.classes[0] == "T-shirt/top"
    assert images.classes[9] == "Ankle boot"
    counts = Counter(images[i][1] for i in range(len(images)))
    assert counts == dict.fromkeys(range(10), per_class)
    image, label = images[7]
    assert (image.mode, image.size, type(label)) == ("RGB", (28, 28), int)
    array = np.asarray(image)
    assert array.std() > 10
    np.testing.assert_array_equal(array[..., 0], array[..., 2])


def test_embedded_labels_belong_to_their_images():
    """A nearest-mean classifier, fitted on train, is right far more often than the 10 % of wrong pairs."""
    train, validation = open_images("fashion", "train"), open_images("fashion", "validation")
    xs = np.stack([pixels(train, i)[..., 0].ravel() for i in range(2000)]).astype(float)
    ys = np.array([train[i][1] for i in range(2000)])
    means = np.stack([xs[ys == label].mean(0) for label in range(10)])
    hits = [
        np.square(means - pixels(validation, i)[..., 0].ravel()).sum(1).argmin() == validation[i][1]
        for i in range(0, 2000, 10)
    ]
    assert np.mean(hits) > 0.55


def test_no_embedded_image_is_in_both_splits():
    seen = [
        {pixels(s, i).tobytes() for i in range(len(s))} for s in map(open_fashion, ("train", "validation"))
    ]
    assert not seen[0] & seen[1]


def open_fashion(split):
    return open_images("fashion", split)


# Every mode, as (image to store, format, the RGB pixel it stands for).
GREY = np.full((4, 5), 100, np.uint8)
PALETTE = Image.new("P", (5, 4), 1)
PALETTE.putpalette([0, 0, 0, 10, 200, 30])
MODES = {
    "grey": (Image.fromarray(GREY), "png", (100, 100, 100)),
    "grey and alpha": (Image.merge("LA", [Image.fromarray(GREY)] * 2), "png", (100, 100, 100)),
    "bilevel": (Image.new("1", (5, 4), 1), "png", (255, 255, 255)),
    "palette": (PALETTE, "png", (10, 200, 30)),
    "alpha": (Image.new("RGBA", (5, 4), (9, 8, 7, 0)), "png", (9, 8, 7)),
    "cmyk": (Image.new("CMYK", (5, 4), (0, 255, 255, 0)), "tif", (255, 0, 0)),
    "16 bit": (Image.fromarray(np.full((4, 5), 128 * 257, np.uint16)), "png", (128, 128, 128)),
    "32 bit": (Image.fromarray(np.full((4, 5), 65535, np.int32)), "tif", (255, 255, 255)),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_becomes_rgb(image_folder, mode):
    root = image_folder(classes=("one",), count=0)
    image, suffix, expected = MODES[mode]
    image.save(root / "train" / "one" / f"a.{suffix}")
    result, _ = open_images(root, "train")[0]
    assert (result.mode, result.size) == ("RGB", (5, 4))
    np.testing.assert_array_equal(np.asarray(result), np.broadcast_to(np.uint8(expected), (4, 5, 3)))


def test_palette_with_transparency_is_read_without_warning(image_folder):
    root = image_folder(classes=("one",), count=0)
    PALETTE.save(root / "train" / "one" / "a.png", transparency=b"\x00\x80")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pixels(open_images(root, "train"), 0)[0, 0].tolist() == [10, 200, 30]


@pytest.mark.parametrize(
    ("array", "message"),
    [(np.full((4, 5), 0.5, np.float32), "floating-point"), (np.full((4, 5), 70000, np.int32), "70000")],
)
def test_pixels_without_a_known_range_are_refused(image_folder, array, message):
    root = image_folder(classes=("one",), count=0)
    Image.fromarray(array).save(root / "train" / "one" / "a.tif")
    with pytest.raises(ValueError, match=rf"a\.tif.*{message}"):
        open_images(root, "train")[0]


def damage(path, kind):
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "text": b"hello"}[kind])


@pytest.mark.parametrize("kind", ["truncated", "empty", "text"])
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_damaged_image_is_refused_by_name(image_folder, kind, suffix):
    root = image_folder(classes=("one",), count=0)
    path = root / "train" / "one" / f"broken.{suffix}"
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    split = open_images(root, "train")
    np.testing.assert_allclose(pixels(split, 0).astype(float).mean(), noise.mean(), atol=3)
    damage(path, kind)
    with pytest.raises(ValueError, match=rf"broken\.{suffix}.*bad_images=.skip"):
        split[0]


def test_damaged_image_is_skipped_with_one_warning(image_folder, caplog):
    root = image_folder(count=2)
    damage(root / "train" / "dog" / "0.png", "truncated")
    split = open_images(root, "train", bad_images="skip")
    with caplog.at_level(logging.WARNING, logger="lineardiff"):
        for _ in range(3):
            labels = [None if item is None else item[1] for item in split]
    assert labels == [0, 0, None, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(root / "train" / "dog" / "0.png") in caplog.text


def test_locate_names_the_file_of_the_item(image_folder):
    root = image_folder(count=2)
    assert open_images(root, "validation").locate(3) == str(root / "val" / "dog" / "1.png")
    assert subset(open_images(root, "train"), limit=4, seed=0).locate(0).endswith("train/cat/0.png")
    assert open_images("fashion", "train").locate(12) == "image 12 of the embedded train images"


def test_index_out_of_range_ends_iteration(image_folder):
    split = open_images(image_folder(count=1), "train")
    with pytest.raises(IndexError):
        split[2]
    assert len(list(split)) == 2


def test_split_survives_pickling(image_folder):
    split = open_images(image_folder(), "train")
    copy = pickle.loads(pickle.dumps(split))
    assert copy.classes == split.classes
    np.testing.assert_array_equal(pixels(copy, 3), pixels(split, 3))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("fasion", "data source fasion does not exist.*'fashion'.*uoft-cs/cifar10"),
        ("/nowhere/at/all", "data source /nowhere/at/all does not exist.*existing folder"),
        ("./owner/name", r"\./owner/name does not exist"),
    ],
)
def test_missing_source(source, message):
    with pytest.raises(ValueError, match=message):
        open_images(source, "train")


def test_file_instead_of_folder(tmp_path):
    (tmp_path / "images.zip").write_bytes(b"")
    with pytest.raises(ValueError, match=r"images\.zip is a file; expected the folder"):
        open_images(tmp_path / "images.zip", "train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "test"}, "split='test'.*'train' or 'validation'"),
        ({"split": "train", "bad_images": "drop"}, "bad_images='drop'.*'refuse' or 'skip'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        open_images("fashion", **arguments)


def test_subset_is_seeded_and_keeps_the_interface():
    whole = open_images("fashion", "train")
    part = subset(whole, limit=50, seed=3)
    assert (len(part), part.classes, part.source, part.split) == (50, whole.classes, "fashion", "train")
    places = [part.locate(i) for i in range(50)]
    assert len(set(places)) == 50
    assert places == [subset(whole, limit=50, seed=3).locate(i) for i in range(50)]
    assert places != [subset(whole, limit=50, seed=4).locate(i) for i in range(50)]
    original = int(places[20].split()[1])
    np.testing.assert_array_equal(pixels(part, 20), pixels(whole, original))
    assert part[20][1] == whole[original][1]
    # The first n of one shuffle: a larger limit adds images, it does not replace any.
    assert set(places) < {subset(whole, limit=80, seed=3).locate(i) for i in range(80)}
    assert len(whole) == 10000


def test_subset_limits():
    whole = open_images("fashion", "validation")
    assert subset(whole, limit=None) is whole
    for limit in (0, 2001):
        with pytest.raises(ValueError, match=f"limit={limit}: expected 1 to 2000"):
            subset(whole, limit=limit)


def test_same_classes(image_folder):
    root = image_folder(classes=("cat", "dog", "eel"))
    train, validation = open_images(root, "train"), open_images(root, "validation")
    check_same_classes(train, validation)
    (root / "val" / "eel").rename(root / "val" / "emu")
    with pytest.raises(ValueError, match=r"3 classes.*only in train: eel; only in validation: emu"):
        check_same_classes(train, open_images(root, "validation"))


def test_imagenet_samples_through_the_transforms(shared_data, tmp_path):
    samples = shared_data / "imagenet_samples"
    with pytest.raises(ValueError, match=r"no train images.*n01440764.*expected .*train/<class>"):
        open_images(samples, "train")
    for name in ("train", "val"):
        (tmp_path / name).symlink_to(samples)
    train, validation = open_images(tmp_path, "train"), open_images(tmp_path, "validation")
    check_same_classes(train, validation)
    files = sorted(samples.glob("*/*.JPEG"))
    assert len(train) == len(train.classes) == len(files) == 100
    headers = [Image.open(path) for path in files]
    grey = [i for i, header in enumerate(headers) if header.mode == "L"]
    ratios = [header.width / header.height for header in headers]
    odd = [int(np.argmin(ratios)), int(np.argmax(ratios))]
    assert grey
    train_tf, eval_tf = train_transform(image_size=64), eval_transform(image_size=64)
    for i in (*grey[:3], *odd, 50):
        image, label = train[i]
        assert (image.mode, image.size, label) == ("RGB", headers[i].size, i)
        for tensor in (train_tf(image), eval_tf(validation[i][0])):
            assert tensor.shape == (3, 64, 64)
            assert tensor.isfinite().all()
            assert tensor.abs().max() < 6
