"""The ImageNet recipes hold the settings of each baseline's authors."""

from dataclasses import asdict

import pytest

from lineardiff.recipes import (
    RECIPES,
    ClassificationRecipe,
    get_recipe,
    imagenet_cswin,
    imagenet_pvt,
    imagenet_swin,
)
from lineardiff.results import find_published

# The defaults that the authors of DeiT, PVT, Swin and CSwin share.
COMMON = {
    "epochs": 300,
    "image_size": 224,
    "optimizer": "adamw",
    "betas": (0.9, 0.999),
    "min_learning_rate": 1e-5,
    "warmup_learning_rate": 1e-6,
    "label_smoothing": 0.1,
    "auto_augment": "rand-m9-mstd0.5-inc1",
    "mixup": 0.8,
    "cutmix": 1.0,
    "mixup_prob": 1.0,
    "mixup_switch_prob": 0.5,
    "random_erasing": 0.25,
    "crop_scale": (0.08, 1.0),
    "hflip": 0.5,
    "interpolation": "bicubic",
}
FIELDS = (
    "batch_size",
    "learning_rate",
    "warmup_epochs",
    "weight_decay",
    "drop_path",
    "clip_grad",
    "ema_decay",
    "repeated_augmentation",
    "color_jitter",
    "crop_pct",
)
AUTHORS = {
    "imagenet_deit": (1024, 1e-3, 5, 0.05, 0.1, None, 0.99996, 3, 0.3, 0.875),
    "imagenet_pvt_tiny": (1024, 1e-3, 5, 0.05, 0.1, None, None, 3, 0.4, 0.875),
    "imagenet_pvt_small": (1024, 1e-3, 5, 0.05, 0.1, None, None, 3, 0.4, 0.875),
    "imagenet_pvt_medium": (1024, 1e-3, 5, 0.05, 0.3, 1.0, None, 3, 0.4, 0.875),
    "imagenet_pvt_large": (1024, 1e-3, 5, 0.05, 0.3, 1.0, None, 3, 0.4, 0.875),
    "imagenet_swin_tiny": (1024, 1e-3, 20, 0.05, 0.2, 5.0, None, 1, 0.4, 0.875),
    "imagenet_swin_small": (1024, 1e-3, 20, 0.05, 0.3, 5.0, None, 1, 0.4, 0.875),
    "imagenet_swin_base": (1024, 1e-3, 20, 0.05, 0.5, 5.0, None, 1, 0.4, 0.875),
    "imagenet_cswin_tiny": (2048, 2e-3, 20, 0.05, 0.2, None, 0.99984, 1, 0.4, 0.9),
    "imagenet_cswin_small": (2048, 2e-3, 20, 0.05, 0.4, None, 0.99984, 1, 0.4, 0.9),
    "imagenet_cswin_base": (1024, 1e-3, 20, 0.1, 0.5, None, 0.99992, 1, 0.4, 0.9),
}


def test_every_imagenet_recipe_is_pinned() -> None:
    classifiers = {name for name, build in RECIPES.items() if isinstance(build(), ClassificationRecipe)}
    assert AUTHORS.keys() == classifiers - {"demo"}


@pytest.mark.parametrize("name", AUTHORS)
def test_settings_are_the_authors(name: str) -> None:
    expected = COMMON | dict(zip(FIELDS, AUTHORS[name], strict=True))
    recipe = asdict(get_recipe(name))
    assert {field: recipe[field] for field in expected} == expected


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("imagenet_deit", "vca_deit_tiny_patch16_224"),
        ("imagenet_pvt_tiny", "vca_pvt_tiny"),
        ("imagenet_swin_tiny", "vca_swin_tiny_patch4_224"),
        ("imagenet_cswin_tiny", "vca_cswin_tiny_224"),
    ],
)
def test_a_recipe_trains_its_vca_model_and_says_what_to_expect(name: str, model: str) -> None:
    assert get_recipe(name).model == model
    top1 = find_published(model, "top1")
    assert top1 is not None
    assert f"top-1 {top1.value} for {model}" in " ".join((RECIPES[name].__doc__ or "").split())


@pytest.mark.parametrize("family", [imagenet_pvt, imagenet_swin, imagenet_cswin])
def test_an_unknown_size_is_refused_with_those_there_are(family: object) -> None:
    with pytest.raises(ValueError, match=r"size='huge': expected one of tiny, small, "):
        family("huge")  # type: ignore[operator]
