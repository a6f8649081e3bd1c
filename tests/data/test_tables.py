import builtins
import sys
import time
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from lineardiff.data import check_same_classes, open_images, subset

datasets = pytest.importorskip("datasets", reason="needs the extra train")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def png(value):
    stream = BytesIO()
    Image.fromarray(np.full((6, 7, 3), value, np.uint8)).save(stream, "png")
    return stream.getvalue()


def write(folder, split="train", *, features=None, **columns):
    """Write a shard as `datasets` does; without columns 4 images of the values 0, 10, 20, 30 in 2 classes."""
    columns = columns or {"image": [png(10 * i) for i in range(4)], "label": [0, 1, 0, 1]}
    features = features or {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])}
    folder.mkdir(exist_ok=True, parents=True)
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def test_cifar10_slice_equals_its_parquet(shared_data, tmp_path, capfd):
    tables = {}
    for split in ("train", "test"):
        file = pq.ParquetFile(shared_data / "cifar10" / f"{split}-00000-of-00001.parquet")
        tables[split] = pa.Table.from_batches([next(file.iter_batches(300))])
        pq.write_table(tables[split], tmp_path / f"{split}-00000-of-00001.parquet")
    train, validation = open_images(str(tmp_path), "train"), open_images(str(tmp_path), "validation")
    check_same_classes(train, validation)
    assert train.classes[:2] == ("airplane", "automobile")
    for split, table in ((train, tables["train"]), (validation, tables["test"])):
        assert len(split) == 300
        assert [item[1] for item in split] == table["label"].to_pylist()
        stored = Image.open(BytesIO(table["image"][77]["bytes"].as_py()))
        np.testing.assert_array_equal(np.asarray(split[77][0]), np.asarray(stored))
    part = subset(train, limit=10, seed=0)
    row = int(part.locate(5).split()[1])
    assert part[5][1] == tables["train"]["label"][row].as_py()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("inside", "validation"), [(".", "validation"), ("data", "test")])
def test_layouts(tmp_path, inside, validation):
    write(tmp_path / inside)
    write(tmp_path / inside, validation, image=[png(5)], label=[1])
    split = open_images(tmp_path, "validation")
    assert (len(split), split.classes, split[0][1]) == (1, ("cat", "dog"), 1)
    assert np.asarray(split[0][0]).max() == 5
    assert split.locate(0) == f"row 0 (column image) in split {validation} of {tmp_path}"


def test_progress_bars_and_logging_are_left_as_they_were(tmp_path):
    before = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    open_images(write(tmp_path / "a"), "train")
    assert (datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()) == before


def test_missing_split(tmp_path):
    with pytest.raises(ValueError, match=r"no validation split: expected validation or .*, found train"):
        open_images(write(tmp_path), "validation")


@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_unreadable_parquet_is_named(tmp_path, damage, capfd):
    path = write(tmp_path) / "train-00000-of-00001.parquet"
    write(tmp_path, "test")
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "text": b"hello", "empty": b""}[damage])
    capfd.readouterr()
    with pytest.raises(ValueError, match=r"file .*train-00000-of-00001\.parquet is damaged") as caught:
        open_images(tmp_path, "train")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_no_rows(tmp_path):
    write(tmp_path, "train", image=[], label=[])
    write(tmp_path, "test")
    with pytest.raises(ValueError, match=r"folder .* cannot be loaded .*train.* no data"):
        open_images(tmp_path, "train")


def test_unwritable_cache_is_named(tmp_path, monkeypatch):
    write(tmp_path / "set")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "file" / "cache")
    with pytest.raises(ValueError, match=r"folder .*set cannot be loaded .*room for a copy.*file/cache"):
        open_images(tmp_path / "set", "train")


def test_damaged_and_missing_images_are_named_by_row(tmp_path, caplog):
    write(tmp_path, image=[png(1), png(2)[:30], None], label=[0, 1, 1])
    split = open_images(tmp_path, "train")
    assert split[0][1] == 0
    for row in (1, 2):
        with pytest.raises(ValueError, match=rf"row {row} \(column image\) in split train"):
            split[row]
    skipping = open_images(tmp_path, "train", bad_images="skip")
    assert [item is None for item in skipping] == [False, True, True]
    assert len(caplog.records) == 2


def test_image_stored_as_a_path(tmp_path):
    (tmp_path / "a.png").write_bytes(png(77))
    table = pa.table({"image": [{"bytes": None, "path": str(tmp_path / "a.png")}], "label": ["x"]})
    (tmp_path / "set").mkdir()
    pq.write_table(table, tmp_path / "set" / "train.parquet")
    assert np.asarray(open_images(tmp_path / "set", "train")[0][0]).max() == 77


@pytest.mark.parametrize("labels", [[7, 3, 7], ["x", "a", "x"]])
@pytest.mark.parametrize("bare", [False, True])
def test_parquet_of_other_programs(tmp_path, labels, bare):
    """Without the features of `datasets` in the file: classes are the distinct labels, sorted."""
    images = [png(10 * i) for i in range(3)]
    cells = images if bare else [{"bytes": image, "path": None} for image in images]
    pq.write_table(pa.table({"img": cells, "labels": labels}), tmp_path / "train.parquet")
    split = open_images(tmp_path, "train")
    assert split.classes == tuple(str(label) for label in sorted(set(labels)))
    assert [item[1] for item in split] == [1, 0, 1]
    assert [int(np.asarray(item[0]).max()) for item in split] == [0, 10, 20]


def test_fine_labels_are_chosen_among_two_kinds(tmp_path):
    features = {
        "img": datasets.Image(),
        "fine_label": datasets.ClassLabel(names=["cat", "dog", "oak"]),
        "coarse_label": datasets.ClassLabel(names=["animal", "plant"]),
    }
    write(tmp_path, features=features, img=[png(0)], fine_label=[2], coarse_label=[1])
    split = open_images(tmp_path, "train")
    assert split.classes[split[0][1]] == "oak"


CAT_DOG = datasets.ClassLabel(names=["cat", "dog"])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            {"left": datasets.Image(), "right": datasets.Image(), "label": CAT_DOG},
            "several.*images.*left, right",
        ),
        ({"image": datasets.Image(), "colour": CAT_DOG, "shape": CAT_DOG}, "several.*labels.*colour, shape"),
        ({"picture": datasets.Value("string"), "label": CAT_DOG}, r"no column of images.*picture \(Value\)"),
        ({"image": datasets.Image(), "caption": datasets.Value("string")}, "no column of labels.*caption"),
    ],
)
def test_columns_that_cannot_be_told_apart(tmp_path, features, message):
    values = {"Image": png(0), "ClassLabel": 0, "Value": "text"}
    columns = {name: [values[type(kind).__name__]] for name, kind in features.items()}
    write(tmp_path, features=features, **columns)
    with pytest.raises(ValueError, match=message):
        open_images(tmp_path, "train")


@pytest.mark.parametrize("label", [-1, None])
def test_rows_without_label(tmp_path, label):
    write(tmp_path, image=[png(0), png(1)], label=[0, label])
    with pytest.raises(ValueError, match=rf"row 1 has the label {label} in column label"):
        open_images(tmp_path, "train")


def test_classes_in_another_order(tmp_path):
    write(tmp_path)
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])}
    write(tmp_path, "test", features=features, image=[png(0)], label=[0])
    # `datasets` reads all splits with the features of the first file, so the two folders are opened apart.
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / "test-00000-of-00001.parquet").rename(other / "test-00000-of-00001.parquet")
    with pytest.raises(ValueError, match="the same names in another order"):
        check_same_classes(open_images(tmp_path, "train"), open_images(other, "validation"))


def test_hub_name_goes_to_load_dataset(monkeypatch):
    asked = []

    def load_dataset(name):
        asked.append(name)
        features = datasets.Features({"image": datasets.Image(), "label": CAT_DOG})
        return {"test": datasets.Dataset.from_dict({"image": [png(9)], "label": [1]}, features=features)}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    split = open_images("some-owner/cats_2.0", "validation")
    assert asked == ["some-owner/cats_2.0"]
    assert (split.source, split[0][1]) == ("some-owner/cats_2.0", 1)


def test_hub_out_of_reach(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match=r"data/cifr10 is not a folder here, and .* hub .*correct the path.*network"
    ) as caught:
        open_images("data/cifr10", "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 404, None])
def test_a_hub_dataset_that_is_not_there_costs_one_request(monkeypatch, capfd, status):
    """A refusal is final; without a connection only the cache is asked, which `datasets` would retry for minutes."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    asked = []

    def dataset_info(self, name, **_):
        asked.append(name)
        if status is None:
            raise ConnectionError("no route")
        response = SimpleNamespace(headers={}, status_code=status, request=None)
        raise HfHubHTTPError(f"{status} Client Error", response=response)

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    started = time.monotonic()
    with pytest.raises(ValueError, match="data/cifr10 is not a folder here"):
        open_images("data/cifr10", "train")
    assert time.monotonic() - started < 5
    assert asked == ["data/cifr10"]
    assert capfd.readouterr().err == ""
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_without_datasets_installed(monkeypatch, tmp_path):
    write(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "datasets"]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.split(".")[0] == "datasets":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="datasets is not installed; run: .*pip install"):
        open_images(tmp_path, "train")
    assert len(open_images("fashion", "validation")) == 2000
