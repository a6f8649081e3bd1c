"""The generation recipes: the authors' settings, the paper's numbers, refused values."""

import pytest

from lineardiff.recipes import RECIPES, GenerationRecipe, fashion_sit, get_recipe, imagenet_dit, imagenet_sit
from lineardiff.results import published

NAMES = [
    f"imagenet_{family}_{size}_{patch_size}"
    for family in ("dit", "sit")
    for size in ("s", "b", "l", "xl")
    for patch_size in (2, 4, 8)
]


@pytest.mark.parametrize("name", NAMES)
def test_the_imagenet_recipes_are_the_authors(name: str) -> None:
    recipe = get_recipe(name)
    assert isinstance(recipe, GenerationRecipe)
    assert (recipe.epochs, recipe.steps, recipe.batch_size) == (None, 400_000, 256)
    assert (recipe.optimizer, recipe.learning_rate, recipe.betas) == ("adamw", 1e-4, (0.9, 0.999))
    assert (recipe.min_learning_rate, recipe.warmup_epochs) == (None, 0)  # constant
    assert (recipe.weight_decay, recipe.clip_grad, recipe.ema_decay) == (0, None, 0.9999)
    assert (recipe.hflip, recipe.image_size, recipe.space) == (0.5, 256, "latents")
    assert (recipe.path, recipe.prediction, recipe.weighting) == ("linear", "velocity", "none")
    assert recipe.objective == ("flow" if "sit" in name else "diffusion")
    assert recipe.model == name.replace("imagenet_", "vca_")


def test_docstrings_say_what_the_paper_reports() -> None:
    reported = {number.model: number.value for number in published() if number.metric == "fid"}
    assert reported
    for family, label in ((imagenet_dit, "DiT"), (imagenet_sit, "SiT")):
        text = " ".join((family.__doc__ or "").split())
        for model, value in reported.items():
            if model.startswith(f"vca_{label.lower()}"):
                assert f"{value} for {model} ({label} {reported[model.removeprefix('vca_')]})" in text


@pytest.mark.parametrize("family", [imagenet_dit, imagenet_sit])
def test_an_unknown_size_is_refused_with_those_there_are(family: object) -> None:
    with pytest.raises(ValueError, match="size='m': expected one of s, b, l, xl"):
        family("m", 2)  # type: ignore[operator]
    with pytest.raises(ValueError, match="patch_size=3: expected one of 2, 4, 8"):
        family("s", 3)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "gan"}, r"objective='gan': expected one of flow, diffusion"),
        ({"path": "cubic"}, r"path='cubic': expected one of linear, gvp, vp"),
        ({"objective": "diffusion", "path": "gvp"}, r"path='gvp': is for objective=flow"),
        ({"objective": "diffusion", "grid_steps": 1}, r"grid_steps=1: expected 2 to 1000"),
        ({"objective": "diffusion", "grid_steps": 1001}, r"grid_steps=1001: expected 2 to 1000"),
        ({"weighting": "likelihood"}, r"weighting='likelihood': is for prediction=score or noise"),
        ({"space": "hsv"}, r"space='hsv': expected one of latents, rgb, grey"),
        ({"hflip": 0.0}, r"hflip=0.0: latents are used as they were written"),
        ({"train_limit": 10}, r"train_limit=10: latents are used as they were written"),
        ({"space": "rgb", "vae": "here"}, r"vae='here': is for space=latents"),
        ({"space": "rgb", "hflip": 1.5}, r"hflip=1.5: expected a probability"),
        ({"grid_images": -1}, r"grid_images=-1: .*0 for no grid"),
        ({"grid_steps": 0}, r"grid_steps=0: expected an integer"),
        ({"validation_limit": 0}, r"validation_limit=0"),
        ({"epochs": 10}, r"steps=400000: with epochs=10: give one of them"),
        ({"model_args": ("sample_size=32",)}, r"sample_size follows from the data"),
    ],
)
def test_refused_values_name_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationRecipe(**changes)  # type: ignore[arg-type]


def test_a_resumed_run_may_draw_other_grids() -> None:
    recipe = fashion_sit()
    other = GenerationRecipe.from_json(recipe.to_json().replace('"grid_images": 40', '"grid_images": 10'))
    assert other != recipe
    assert recipe.changes(other) == {}
    assert RECIPES["fashion_sit"]() == recipe
