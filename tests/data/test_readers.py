import logging
import shutil
import sys
import types

import numpy as np
import pytest
from PIL import Image

from lineardiff.data import open_folder, open_images, readers


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
        ValueError, match=r"no train images: it holds cat, dog; expected .*/train/<class>/\*\.jpg"
    ):
        open_images(root, "train")
    with pytest.raises(
        ValueError, match=r"no validation images: it holds train; .*validation\|valid\|val\|test"
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


@pytest.mark.parametrize("hidden", [".ipynb_checkpoints", "__MACOSX", "@eaDir", ".thumbnails"])
def test_hidden_folders_are_neither_classes_nor_images(image_folder, hidden):
    root = image_folder(count=1)
    for parent in (root / "train", root / "train" / "cat", root / "train" / "cat" / "more"):
        (parent / hidden).mkdir(parents=True)
        shutil.copy(root / "train" / "dog" / "0.png", parent / hidden / "0.png")
    shutil.copy(root / "train" / "dog" / "0.png", root / "train" / "cat" / "._0.png")
    split = open_images(root, "train")
    assert split.classes == ("cat", "dog")
    assert [item[1] for item in split] == [0, 1]
    assert len(open_folder(root / "train")) == 2


def test_hidden_parquet_files_do_not_make_a_folder_of_tables(image_folder):
    root = image_folder(count=1)
    (root / "._train.parquet").write_bytes(b"metadata of another system")
    assert len(open_images(root, "train")) == 2


# What each EXIF orientation says about where the stored rows and columns belong (EXIF 2.32, section 4.6.4).
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_images_are_turned_upright(image_folder, orientation, dtype):
    root = image_folder(classes=("cat",), count=1)
    values = np.random.default_rng(0).integers(0, 256, (3, 5), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = root / "train" / "cat" / "0.png"
    Image.fromarray(values.astype(dtype) * (257 if dtype == np.uint16 else 1)).save(path, exif=exif)
    for split in (open_images(root, "train"), open_folder(root / "train")):
        np.testing.assert_array_equal(np.asarray(split[0][0])[..., 1], UPRIGHT[orientation](values))


def test_avif_is_read_where_pillow_can(image_folder, monkeypatch, caplog):
    root = image_folder(count=1)
    (root / "train" / "cat" / "0.png").unlink()
    Image.new("RGB", (16, 8), (200, 10, 30)).save(root / "train" / "cat" / "a.avif", quality=100)
    split = open_images(root, "train")
    assert np.abs(np.asarray(split[0][0]).astype(int) - (200, 10, 30)).max() < 5
    assert caplog.text == ""
    monkeypatch.setattr(readers.features, "check", lambda name: False)
    with pytest.raises(ValueError, match="classes cat have no images"):
        open_images(root, "train")
    assert "skipped 1 files" in caplog.text
    assert "1 .avif" in caplog.text
    assert "Pillow 11.3" in caplog.text


def test_heic_is_counted_without_pillow_heif_and_read_with_it(image_folder, monkeypatch, caplog):
    root = image_folder(count=1)
    for name in ("a.HEIC", "b.heif", "notes.txt"):
        (root / "train" / "cat" / name).write_bytes(b"heic:" + bytes([7]))
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    readers._can_read_heif.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lineardiff"):
        assert len(open_images(root, "train")) == 2
    [record] = caplog.records
    assert "skipped 3 files" in record.getMessage()
    assert "1 .heic, 1 .heif, 1 .txt" in record.getMessage()
    assert "pip install pillow-heif" in record.getMessage()

    def register():
        def accept(prefix):
            return prefix.startswith(b"heic:")

        Image.register_open(
            "HEIC_TEST", lambda fp, name: Image.new("RGB", (2, 2), (fp.read()[5], 0, 0)), accept
        )

    monkeypatch.setitem(sys.modules, "pillow_heif", types.SimpleNamespace(register_heif_opener=register))
    readers._can_read_heif.cache_clear()
    try:
        split = open_images(root, "train")
        assert [split.locate(i).rpartition("/")[2] for i in range(3)] == ["0.png", "a.HEIC", "b.heif"]
        assert split[1][0].getpixel((0, 0)) == (7, 0, 0)
    finally:
        readers._can_read_heif.cache_clear()
        Image.OPEN.pop("HEIC_TEST", None)
        Image.ID.remove("HEIC_TEST")
