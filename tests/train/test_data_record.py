"""The record of training data changes with names, sizes, classes and their order, and with nothing else."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from lineardiff.data import open_images
from lineardiff.runs.run import _changed_data
from lineardiff.train.data_record import data_record


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / split / name / f"{number}.bmp")
    return tmp_path


def record(folder: Path) -> dict:
    return data_record(train=open_images(folder, "train"), validation=open_images(folder, "validation"))


def add(folder: Path) -> None:
    Image.new("RGB", (8, 8)).save(folder / "train/cat/new.bmp")


def enlarge(folder: Path) -> None:
    Image.new("RGB", (9, 9)).save(folder / "val/dog/0.bmp")


def rename_image(folder: Path) -> None:
    (folder / "train/dog/0.bmp").rename(folder / "train/dog/2.bmp")


def rename_class(folder: Path) -> None:
    for split in ("train", "val"):
        (folder / split / "cat").rename(folder / split / "feline")


@pytest.mark.parametrize(
    ("change", "differences"),
    [
        (add, ["train: cat had 2 images and has 3"]),
        (enlarge, ["validation: dog has other images"]),
        (rename_image, ["train: dog has other images"]),
        (
            rename_class,
            ["train: cat is gone", "train: feline is new", "train: dog was class 1 and is class 0"],
        ),
    ],
)
def test_a_change_is_named(photos: Path, change: Callable[[Path], None], differences: list[str]) -> None:
    before = record(photos)
    change(photos)
    described = _changed_data(before, record(photos))
    assert all(difference in described for difference in differences)


def test_times_and_the_place_of_the_folder_do_not_matter(photos: Path, tmp_path: Path) -> None:
    before = record(photos)
    os.utime(photos / "train/cat/0.bmp", (1, 1))
    assert before == record(photos.rename(tmp_path.with_name("moved")))
    assert _changed_data(before, before) == ""
