"""torch-fidelity's Inception with random weights: the network is the real one, the numbers mean nothing."""

from pathlib import Path
from unittest import mock

import torch
from torch import nn


def random_inception() -> nn.Module:
    """The same network every time, of weights with which features differ from image to image."""
    from torch_fidelity import feature_extractor_inceptionv3 as inception

    with (
        mock.patch.object(inception, "load_state_dict_from_url", return_value={}),
        mock.patch.object(inception.FeatureExtractorInceptionV3, "load_state_dict"),
    ):
        network = inception.FeatureExtractorInceptionV3("inception-v3-compat", ["2048", "logits_unbiased"])
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, generator=generator)
        elif isinstance(module, nn.BatchNorm2d):
            module.bias.normal_(std=0.1, generator=generator)
            module.running_mean.normal_(std=0.1, generator=generator)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(std=0.05, generator=generator)
            module.bias.normal_(generator=generator)
    return network


def save_random_inception(file: Path) -> Path:
    torch.save(random_inception().state_dict(), file)
    return file


def random_images(count: int, *, seed: int, size: int = 40) -> torch.Tensor:
    """Blotches of colour (count, 3, size, size), uint8, unlike each other."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=generator)
    pixels = nn.functional.interpolate(coarse, (size, size), mode="bicubic").clamp(0, 1) * 255
    return pixels.round().to(torch.uint8)
