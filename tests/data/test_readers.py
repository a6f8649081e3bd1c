import shutil

import numpy as np
import pytest

from lineardiff.data import open_images


@pytest.mark.parametrize("name", ["validation", "valid", "val", "test"])
def test_names_of_the_validation_folder(image_folder, name):
    root = image_folder(splits=("train", name))
    split = open_images(str(root), "validation")
    assert (split.classes, split.split, len(split)) == (("cat", "dog"), "validation", 4)
    assert [item[1] for item in split] == [0, 0, 1, 1]
    assert np.asarray(split[3][0])[0, 0].tolist() == [10, 20, 200]
    assert f"/{name}/" in split.locate(0)


def test_validation_is_preferred_to_test(image_folder):
    root = image_folder(splits=("train", "val", "test"))
    assert "/val/" in open_images(root, "validation").locate(0)


def test_home_folder_is_expanded(image_folder, monkeypatch):
    root = image_folder()
    monkeypatch.setenv("HOME", str(root.parent))
    assert len(open_images("~/pictures", "train")) == 4


def test_nested_images_and_upper_case_names_are_found(image_folder):
    root = image_folder(count=1)
    (root / "train" / "cat" / "more").mkdir()
    shutil.copy(root / "train" / "cat" / "0.png", root / "train" / "cat" / "more" / "B.PNG")
    assert [item[1] for item in open_images(root, "train")] == [0, 0, 1]


def test_root_without_splits(image_folder):
    root = image_folder(splits=("train",)) / "train"
    with pytest.raises(
        ValueError, match=r"no train images: it holds cat, dog, expected .*/train/<class>/\*\.jpg"
    ):
        open_images(root, "train")
    with pytest.raises(
        ValueError, match=r"no validation images: it holds train, .*validation\|valid\|val\|test"
    ):
        open_images(root.parent, "validation")


def test_empty_root(tmp_path):
    with pytest.raises(ValueError, match="no train images: it holds nothing"):
        open_images(tmp_path, "train")


def test_split_without_class_folders(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(ValueError, match=r"train cannot be used.*class folder.*train/<class>/\*\.jpg"):
        open_images(tmp_path, "train")


def test_empty_class_folder_is_named(image_folder):
    root = image_folder()
    (root / "train" / "emu").mkdir()
    with pytest.raises(ValueError, match=r"train cannot be used.*classes emu.*at least one image"):
        open_images(root, "train")


def test_image_deleted_after_opening_is_named(image_folder):
    root = image_folder()
    split = open_images(root, "train")
    (root / "train" / "cat" / "1.png").unlink()
    with pytest.raises(ValueError, match=r"train/cat/1\.png cannot be decoded: .*No such file"):
        split[1]
