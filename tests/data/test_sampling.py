import random
from itertools import chain

import numpy as np
import pytest
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader

from lineardiff.data import (
    Augmented,
    EpochBatches,
    Transformed,
    drop_bad,
    eval_transform,
    open_images,
    steps_per_epoch,
    subset,
    train_transform,
)


def global_batches(world_size, **arguments):
    """Interleave the ranks' batches again: for every step the samples in the order of the epoch."""
    ranks = [list(EpochBatches(world_size=world_size, rank=rank, **arguments)) for rank in range(world_size)]
    return [list(chain.from_iterable(zip(*step, strict=True))) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_epoch_is_a_permutation_for_any_number_of_ranks(world_size):
    batches = global_batches(world_size, length=50, batch_size=12, total_steps=8, seed=3)
    assert [len(batch) for batch in batches] == [12] * 8
    first, second = (list(chain.from_iterable(batches[i : i + 4])) for i in (0, 4))
    for epoch in (first, second):
        assert len({index for index, _ in epoch}) == 48
        assert {index for index, _ in epoch} < set(range(50))
        assert len({seed for _, seed in epoch}) == 48
    assert [index for index, _ in first] != [index for index, _ in second]
    assert first != sorted(first)
    assert batches == global_batches(1, length=50, batch_size=12, total_steps=8, seed=3)


def test_every_image_is_met_over_the_epochs():
    epochs = EpochBatches(50, batch_size=12, total_steps=40)
    assert {index for batch in epochs for index, _ in batch} == set(range(50))


def test_starting_later_gives_the_rest():
    arguments = {"batch_size": 8, "total_steps": 20, "world_size": 2, "rank": 1, "seed": 5, "repeats": 3}
    whole = list(EpochBatches(30, **arguments))
    for start in (0, 1, 3, 7, 20):
        sampler = EpochBatches(30, start_step=start, **arguments)
        assert len(sampler) == 20 - start
        assert list(sampler) == whole[start:]
        assert list(sampler) == whole[start:]
    assert list(EpochBatches(30, **{**arguments, "total_steps": 9})) == whole[:9]
    assert list(EpochBatches(30, **{**arguments, "seed": 6})) != whole


def test_sampling_leaves_the_global_generators_alone():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    list(EpochBatches(30, batch_size=8, total_steps=9))
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def in_order_of_appearance(ranks):
    """Rename the images by when they first appear, so that two permutations can be compared."""
    names = {}
    for index in chain.from_iterable(zip(*ranks, strict=True)):
        names.setdefault(index, len(names))
    return [[names[index] for index in rank] for rank in ranks]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_repeated_augmentation_spreads_copies_like_timm(world_size):
    length, batch_size = 512, 64
    theirs = [
        list(RepeatAugSampler(range(length), num_replicas=world_size, rank=rank, num_repeats=3))
        for rank in range(world_size)
    ]
    arguments = {"batch_size": batch_size, "total_steps": 8, "world_size": world_size, "repeats": 3}
    ours = [
        [index for batch in EpochBatches(length, rank=rank, **arguments) for index, _ in batch]
        for rank in range(world_size)
    ]
    assert in_order_of_appearance(ours) == in_order_of_appearance([[int(i) for i in rank] for rank in theirs])


def test_copies_have_seeds_of_their_own_and_ranks_of_their_own():
    batch = global_batches(4, length=512, batch_size=64, total_steps=1, repeats=3)[0]
    for start in range(0, 63, 3):
        copies = batch[start : start + 3]
        assert len({index for index, _ in copies}) == 1
        assert len({seed for _, seed in copies}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 51}, "batch_size=51 with 50 training images"),
        ({"batch_size": 0}, "batch_size=0 with 50"),
        ({"batch_size": 10, "world_size": 4}, "batch_size=10: expected a multiple of the 4 processes"),
        ({"rank": 2, "world_size": 2}, "rank=2 with world_size=2"),
        ({"start_step": 11}, "start_step=11, total_steps=10"),
        ({"repeats": 0}, "repeats=0 .*expected 1 to 10"),
        ({"repeats": 1000}, "repeats=1000 .*expected 1 to 10"),
        ({"seed": -1}, "seed=-1: expected 0 or more"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        EpochBatches(50, **{"batch_size": 10, "total_steps": 10, **arguments})


def test_steps_per_epoch():
    assert [steps_per_epoch(50, batch_size=size) for size in (1, 12, 50)] == [50, 4, 1]
    with pytest.raises(ValueError, match="no full batch"):
        steps_per_epoch(0, batch_size=1)


@pytest.fixture(scope="module")
def images():
    return subset(open_images("fashion", "train"), limit=40, seed=0)


@pytest.fixture(scope="module")
def augmented(images):
    return Augmented(images, train_transform(image_size=32))


def test_sample_follows_from_its_key(augmented):
    assert len(augmented) == 40
    first, label = augmented[5, 123]
    np.random.seed(99)
    torch.manual_seed(99)
    batch = augmented.__getitems__([(3, 7), (5, 123), (5, 124)])
    torch.testing.assert_close(batch[1][0], first, rtol=0, atol=0)
    assert batch[1][1] == label == augmented.split[5][1]
    assert not torch.equal(batch[2][0], first)


def test_the_three_generators_are_seeded_and_restored(images):
    def draw(image):
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    drawn = Augmented(images, draw).__getitems__([(0, 17), (1, 2**32 - 1)])
    after = draw(None)
    for (numbers, _), seed in zip(drawn, (17, 2**32 - 1), strict=True):
        assert numbers == (
            random.Random(seed).random(),
            float(np.random.RandomState(seed).rand()),
            float(torch.rand((), generator=torch.Generator().manual_seed(seed))),
        )
    assert after == (
        random.Random(1).random(),
        float(np.random.RandomState(1).rand()),
        float(torch.rand((), generator=torch.Generator().manual_seed(1))),
    )


def test_generators_are_restored_after_an_error(images):
    def fail(image):
        raise KeyError("transform")

    torch.manual_seed(4)
    with pytest.raises(KeyError, match="transform"):
        Augmented(images, fail)[0, 1]
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(4)))


def test_workers_and_restarts_do_not_change_the_batches(augmented):
    def load(workers, start):
        sampler = EpochBatches(
            len(augmented), batch_size=16, total_steps=5, start_step=start, repeats=3, seed=8
        )
        return list(DataLoader(augmented, batch_sampler=sampler, num_workers=workers))

    whole = load(0, 0)
    assert whole[0][0].shape == (16, 3, 32, 32)
    for workers, start in ((2, 0), (1, 3)):
        for (x, y), (x_loaded, y_loaded) in zip(whole[start:], load(workers, start), strict=True):
            assert torch.equal(x, x_loaded)
            assert torch.equal(y, y_loaded)


@pytest.fixture
def damaged(image_folder):
    root = image_folder(count=3)
    for name in ("cat/1.png", "cat/2.png"):
        (root / "train" / name).write_bytes(b"damaged")
    return root


def test_augmented_takes_the_next_image_for_a_bad_one(damaged):
    split = open_images(damaged, "train", bad_images="skip")
    dataset = Augmented(split, lambda image: image.getpixel((0, 0)))
    # Images 1 and 2 are damaged; image 3 is dog/0.png.
    assert [dataset[i, 0] for i in range(4)] == [((0, 0, 200), 0)] + [((10, 0, 200), 1)] * 3


def test_augmented_without_any_good_image(damaged):
    for path in (damaged / "train").rglob("*.png"):
        path.write_bytes(b"damaged")
    split = open_images(damaged, "train", bad_images="skip")
    with pytest.raises(ValueError, match="none of the 6 images can be decoded"):
        Augmented(split, train_transform(image_size=32))[0, 0]


def test_bad_image_ends_the_loading_by_name(damaged):
    dataset = Augmented(open_images(damaged, "train"), train_transform(image_size=32))
    sampler = EpochBatches(len(dataset), batch_size=6, total_steps=1)
    with pytest.raises(ValueError, match=r"cat/[12]\.png cannot be decoded"):
        list(DataLoader(dataset, batch_sampler=sampler))


def test_evaluation_drops_bad_images(damaged):
    split = open_images(damaged, "train", bad_images="skip")
    dataset = Transformed(split, eval_transform(image_size=32))
    batches = list(DataLoader(dataset, batch_size=4, collate_fn=drop_bad))
    assert [batch[1].tolist() for batch in batches] == [[0, 1], [1, 1]]
    assert batches[0][0].shape == (2, 3, 32, 32)
    expected = eval_transform(image_size=32)(split[3][0])
    assert torch.equal(batches[0][0][1], expected)
    assert drop_bad([None, None]) is None


def test_evaluation_order_is_that_of_the_split(images):
    dataset = Transformed(images, eval_transform(image_size=32))
    labels = torch.cat([y for _, y in DataLoader(dataset, batch_size=7, collate_fn=drop_bad)])
    assert labels.tolist() == [item[1] for item in images]


@pytest.mark.parametrize(("length", "dropped"), [(40, 8), (33, None), (64, None)])
def test_a_batch_that_drops_much_of_each_epoch_is_logged_once(length, dropped, caplog):
    for rank in (0, 1):
        EpochBatches(length, batch_size=32, total_steps=3, world_size=2, rank=rank)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (dropped is not None)
    assert dropped is None or f"leaves out {dropped} of them (20%)" in said[0]
