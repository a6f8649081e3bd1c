import random
from contextlib import suppress

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from timm.data.auto_augment import RandAugment

from lineardiff.data import eval_transform, train_transform

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
PLAIN = {"auto_augment": None, "color_jitter": 0.0, "random_erasing": 0.0, "hflip": 0.0}


def picture(width, height, seed=0):
    """Smooth colours and some noise, so that every operation changes it."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)).resize((width, height))
    noise = rng.integers(-20, 21, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(small) + noise, 0, 255).astype(np.uint8))


def bytes_of(tensor):
    """The 8-bit image (H, W, 3) that a normalised tensor stands for."""
    return (tensor * STD + MEAN).mul(255).round().to(torch.uint8).permute(1, 2, 0).numpy()


def seed_all(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("size", [(300, 200), (61, 400)])
def test_eval_is_resize_and_centre_crop(size):
    image = picture(*size)
    short = int(224 / 0.875)
    scale = short / min(size)
    resized = image.resize([short if s == min(size) else int(scale * s) for s in size], Image.BICUBIC)
    left, top = (round((side - 224) / 2) for side in resized.size)
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224)))
    result = eval_transform(image_size=224)(image)
    assert (result.shape, result.dtype) == ((3, 224, 224), torch.float32)
    np.testing.assert_array_equal(bytes_of(result), expected)


def test_eval_leaves_an_image_of_the_right_size_alone():
    image = picture(32, 32)
    result = eval_transform(image_size=32, crop_pct=1.0, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))(image)
    expected = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.5) / 0.25
    torch.testing.assert_close(result, expected)


def test_default_training_transform_is_deits():
    """Against timm's factory with the arguments that DeiT's datasets.py and main.py give it."""
    deit = create_transform(
        input_size=64,
        is_training=True,
        color_jitter=0.3,
        auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="bicubic",
        re_prob=0.25,
        re_mode="pixel",
        re_count=1,
    )
    ours = train_transform(image_size=64)
    image = picture(120, 90)
    results, compared = set(), 0
    for seed in range(60):
        seed_all(seed)
        result = ours(image)
        assert (result.shape, result.dtype) == ((3, 64, 64), torch.float32)
        results.add(bytes_of(result).tobytes())
        seed_all(seed)
        with suppress(ValueError):  # Pillow 13 refuses timm's posterizing to 0 bits
            torch.testing.assert_close(result, deit(image), rtol=0, atol=0)
            compared += 1
    assert compared > 50
    assert len(results) == 60


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "rand-m0", "v0-mstd3", "augmix-m10-w2-d2"])
def test_strongest_and_weakest_magnitudes_run(policy):
    """Magnitude 10 (or 0, for the policies that count down) asks Pillow to posterize to 0 bits."""
    transform = train_transform(image_size=16, auto_augment=policy)
    image = picture(16, 16)
    for seed in range(100):
        seed_all(seed)
        assert transform(image).isfinite().all()


def test_posterize_to_no_bits_is_black():
    transform = train_transform(image_size=16, auto_augment="rand-m10-inc1")
    policy = next(step for step in transform.transforms if isinstance(step, RandAugment))
    operation = next(op for op in policy.ops if op.name == "PosterizeIncreasing")
    operation.prob = 1.0
    image = picture(16, 16)
    assert operation(image).getextrema() == ((0, 0),) * 3
    operation.magnitude = 5
    np.testing.assert_array_equal(np.asarray(operation(image)), np.asarray(image) & 0b11000000)


def test_pad_crop_is_a_shifted_window():
    image = picture(32, 32)
    padded = np.asarray(ImageOps.expand(image, 4))
    windows = {padded[y : y + 32, x : x + 32].tobytes() for y in range(9) for x in range(9)}
    transform = train_transform(image_size=32, train_crop="pad", **PLAIN)
    seen = {bytes_of(transform(image)).tobytes() for _ in range(200)}
    assert seen <= windows
    assert len(seen) > 40


def test_pad_crop_resizes_first():
    transform = train_transform(image_size=32, train_crop="pad", **PLAIN)
    image = Image.new("RGB", (28, 28), (200, 100, 50))
    result = bytes_of(transform(image))
    colours = {tuple(pixel) for pixel in result.reshape(-1, 3).tolist()}
    assert result.shape == (32, 32, 3)
    assert colours <= {(200, 100, 50), (0, 0, 0)}
    assert (result[..., 0] == 200).sum() >= 28 * 28
    assert transform(picture(100, 40)).shape == (3, 32, 32)


def test_flip_probability():
    image = picture(32, 32)
    flipped = np.asarray(ImageOps.mirror(image))
    for probability, expected in ((0.0, np.asarray(image)), (1.0, flipped)):
        transform = train_transform(image_size=32, **{**PLAIN, "hflip": probability})
        transform.transforms.pop(0)
        np.testing.assert_array_equal(bytes_of(transform(image)), expected)


def test_crop_scale_bounds_the_area():
    """On an image whose pixel values are its coordinates, the crop tells its own width and height."""
    ramp = np.zeros((200, 200, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = np.arange(200)[None, :], np.arange(200)[:, None]
    transform = train_transform(image_size=64, crop_scale=(0.2, 0.3), interpolation="nearest", **PLAIN)
    shares = []
    for seed in range(50):
        seed_all(seed)
        result = bytes_of(transform(Image.fromarray(ramp))).astype(int)
        shares.append(np.ptp(result[..., 0]) * np.ptp(result[..., 1]) / 200**2)
    assert min(shares) > 0.17
    assert max(shares) < 0.31
    assert np.std(shares) > 0.01


def test_random_erasing_writes_noise_in_a_rectangle():
    image = Image.new("RGB", (32, 32), (128, 128, 128))
    erased = train_transform(image_size=32, **{**PLAIN, "random_erasing": 1.0})(image)
    background = eval_transform(image_size=32, crop_pct=1.0)(image)
    changed = (erased != background).any(0)
    rows, columns = changed.any(1).nonzero().ravel(), changed.any(0).nonzero().ravel()
    assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    assert 0.01 < changed.float().mean() < 0.4
    assert erased[:, changed].std() > 0.8
    untouched = train_transform(image_size=32, **PLAIN)(image)
    torch.testing.assert_close(untouched, background)


def test_color_jitter_changes_the_brightness():
    image = Image.new("RGB", (32, 32), (120, 120, 120))
    jittered = train_transform(image_size=32, **{**PLAIN, "color_jitter": 0.5})
    assert len({bytes_of(jittered(image))[0, 0, 0] for _ in range(20)}) > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": 0}, "image_size=0: expected .* pixels"),
        ({"train_crop": "centre"}, "train_crop='centre': expected 'random-resized' or 'pad'"),
        ({"crop_scale": (0.5, 0.2)}, r"crop_scale=\(0.5, 0.2\): expected"),
        ({"crop_scale": (0.0, 1.0)}, "crop_scale"),
        ({"random_erasing": 1.5}, "random_erasing=1.5: expected a probability"),
        ({"hflip": -0.1}, "hflip=-0.1: expected a probability"),
        ({"color_jitter": -1.0}, "color_jitter=-1.0: expected"),
        ({"interpolation": "cubic"}, "interpolation='cubic': expected one of .*bicubic.*random"),
        ({"auto_augment": "rnd-m9"}, "auto_augment='rnd-m9' is not a policy.*'rand-m9-mstd0.5-inc1'"),
        ({"auto_augment": "rand-z9"}, "auto_augment='rand-z9' is not a policy"),
    ],
)
def test_wrong_training_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        train_transform(**{"image_size": 32, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"image_size": -1}, "image_size=-1"),
        ({"crop_pct": 0.0}, "crop_pct=0.0: expected"),
        ({"crop_pct": 87.5}, "crop_pct=87.5: expected"),
        ({"interpolation": "random"}, "interpolation='random': expected one of nearest"),
    ],
)
def test_wrong_evaluation_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        eval_transform(**{"image_size": 32, **arguments})


@pytest.mark.parametrize("build", [train_transform, eval_transform])
@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": [0.5]},
        {"std": (0.5, 0.5)},
        {"mean": (0.5, float("nan"), 0.5)},
        {"std": (0.5, 0.5, 0.0)},
        {"image_size": float("nan")},
        {"image_size": 0},
    ],
)
def test_statistics_for_other_channels_and_numbers_that_are_none_are_refused(build, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        build(**{"image_size": 32, **wrong})


@pytest.mark.parametrize("name", ["color_jitter", "hflip", "random_erasing"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1])
def test_training_numbers_that_are_none_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        train_transform(image_size=32, **{name: value})
