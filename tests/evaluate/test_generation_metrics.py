import logging
import math
from pathlib import Path

import pytest
import torch
import torch_fidelity
from random_inception import random_images, save_random_inception
from torch import Tensor
from torch.utils.data import Dataset
from toy_extractor import ChannelMeans

from lineardiff.evaluate.features import InceptionFeatures
from lineardiff.evaluate.generation_metrics import generation_scores, inception_score, precision_recall
from lineardiff.evaluate.image_batches import TensorBatches
from lineardiff.evaluate.image_features import ImageFeatures, extract


class Images(Dataset[Tensor]):
    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index]


def test_fid_inception_score_precision_and_recall_are_torch_fidelitys(tmp_path: Path) -> None:
    weights = save_random_inception(tmp_path / "weights.pth")
    samples, real = random_images(10, seed=1), random_images(8, seed=2)
    extractor = InceptionFeatures(weights)
    found = generation_scores(
        extract(TensorBatches(samples, batch_size=4), extractor), extract(TensorBatches(real), extractor)
    )
    expected = torch_fidelity.calculate_metrics(
        input1=Images(samples),
        input2=Images(real),
        feature_extractor="inception-v3-compat",
        feature_extractor_weights_path=str(weights),
        fid=True,
        isc=True,
        prc=True,
        isc_splits=1,
        samples_shuffle=False,
        batch_size=10,
        cuda=False,
        cache=False,
        save_cpu_ram=True,
        verbose=False,
    )
    assert found["fid"] == pytest.approx(expected["frechet_inception_distance"], rel=1e-4)
    assert found["inception_score"] == pytest.approx(expected["inception_score_mean"], rel=1e-7)
    assert found["precision"] == pytest.approx(expected["precision"])
    assert found["recall"] == pytest.approx(expected["recall"])
    assert 0 < found["precision"] < 1 or 0 < found["recall"] < 1
    assert found["sfid"] > 0
    assert (found["sample_images"], found["reference_images"]) == (10, 8)


def test_inception_score_of_known_predictions() -> None:
    certain = 1e4 * torch.eye(10)
    # every image sure of its class, all classes as often: as many as there are classes
    assert inception_score(certain.repeat(7, 1)) == pytest.approx(10)
    assert inception_score(certain[:1].repeat(20, 1)) == pytest.approx(1)
    assert inception_score(torch.zeros(20, 10)) == pytest.approx(1)
    # p(y|x) = (3/4, 1/4) and (1/4, 3/4): KL to (1/2, 1/2) is 3/4 ln 3/2 + 1/4 ln 1/2 for both
    logits = torch.tensor([[3.0, 1.0], [1.0, 3.0]]).log()
    assert inception_score(logits) == pytest.approx(math.exp(0.75 * math.log(1.5) + 0.25 * math.log(0.5)))
    # the mean over splits in order: 10 classes in the first, one in the second
    logits = torch.cat([certain, certain[:1].repeat(10, 1)])
    assert inception_score(logits, split_size=10) == pytest.approx((10 + 1) / 2)


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_precision_and_recall_of_points_on_a_line(rows: int) -> None:
    reference = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None]  # radii (3rd neighbor): 3, 2, 2, 3
    samples = torch.tensor([-2.5, 0.5, 7.0, 20.0, 21.0])[:, None]  # radii: 22.5, 19.5, 13, 19.5, 20.5
    # -2.5 is within 3 of 0, 0.5 within everything; 7 is 4 from 3, the others further
    precision, recall = precision_recall(samples, reference, rows=rows)
    assert precision == pytest.approx(2 / 5)
    assert recall == 1
    recall, precision = precision_recall(reference, samples, rows=rows)
    assert (precision, recall) == (pytest.approx(2 / 5), 1)
    far = precision_recall(samples + 1000, reference, rows=rows)
    assert far == (0, 0)
    assert precision_recall(reference, reference.flip(0), rows=rows) == (1, 1)


def test_precision_and_recall_count_the_neighbors() -> None:
    reference = torch.tensor([0.0, 1.0, 2.0, 3.0])[:, None]
    samples = torch.tensor([-0.9, -1.1])[:, None]
    assert precision_recall(samples, reference, neighbors=1)[0] == 0.5
    with pytest.raises(ValueError, match="3 samples: precision and recall need at least 4"):
        precision_recall(torch.zeros(3, 2), torch.zeros(9, 2))
    with pytest.raises(ValueError, match="3 reference images"):
        precision_recall(torch.zeros(9, 2), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="2 features, the reference 3"):
        precision_recall(torch.zeros(9, 2), torch.zeros(9, 3))


def described(count: int, name: str, *, seed: int, floor: bool = False) -> ImageFeatures:
    return extract(TensorBatches(random_images(count, seed=seed, size=4)), ChannelMeans(name), floor=floor)


def test_lite0_is_reported_beside_its_floor_and_never_as_fid() -> None:
    found = generation_scores(
        described(30, "lite0", seed=0), real := described(40, "lite0", seed=1, floor=True)
    )
    assert set(found) == {"fd_lite0", "fd_lite0_floor", "sample_images", "reference_images"}
    assert found["fd_lite0_floor"] == real.statistics.floor > 0
    with pytest.raises(ValueError, match="samples' features are lite0's and the reference's inception's"):
        generation_scores(described(30, "lite0", seed=0), described(40, "inception", seed=1))


def test_what_statistics_alone_cannot_tell_is_none() -> None:
    samples, real = described(30, "inception", seed=0), described(40, "inception", seed=1)
    whole = generation_scores(samples, real)
    assert None not in whole.values()
    found = generation_scores(samples, ImageFeatures(real.statistics))
    assert found == whole | {"precision": None, "recall": None}


def test_fewer_images_than_features_warn_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lineardiff"):
        generation_scores(described(30, "lite0", seed=0), described(40, "lite0", seed=1, floor=True))
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "lineardiff"):
        found = generation_scores(described(3, "lite0", seed=0), described(5, "lite0", seed=1, floor=True))
    assert math.isfinite(found["fd_lite0"])
    (record,) = caplog.records
    assert (
        "fewer images than the 3 features (sample images: 3, half of the reference images: 2)"
        in record.getMessage()
    )
