"""The recipes: exact round trips, refused values, and the settings of the paper."""

import dataclasses
import json
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest

from lineardiff.recipes import RECIPES, ClassificationRecipe, GenerationRecipe, TrainingRecipe, get_recipe

ODD = ClassificationRecipe(
    model_args=("attention=mhsa", "contrast_grid=(4, 4)", "qkv_bias=False"),
    learning_rate=1 / 3,
    betas=(0.9, 0.95),
    layer_decay=0.75,
    auto_augment=None,
    warmup_epochs=0.1,
    train_limit=7,
)


@pytest.mark.parametrize("recipe", [ODD, *(build() for build in RECIPES.values())], ids=lambda r: r.name)
def test_json_round_trip_is_exact(recipe: TrainingRecipe) -> None:
    again = type(recipe).from_json(recipe.to_json())
    assert again == recipe
    assert [type(v) for v in asdict(again).values()] == [type(v) for v in asdict(recipe).values()]
    assert again.to_json() == recipe.to_json()


def test_json_with_an_unknown_field_or_a_wrong_type_is_refused() -> None:
    values = json.loads(ODD.to_json())
    with pytest.raises(ValueError, match=r"unknown field learning_rat .*remove it"):
        ClassificationRecipe.from_json(json.dumps(values | {"learning_rat": 1.0}))
    with pytest.raises(ValueError, match="learning_rate='1e-3': expected a finite number"):
        ClassificationRecipe.from_json(json.dumps(values | {"learning_rate": "1e-3"}))
    with pytest.raises(ValueError, match="JSON object"):
        ClassificationRecipe.from_json("[]")
    with pytest.raises(ValueError, match="epochs=0"):
        ClassificationRecipe.from_json(json.dumps(values | {"epochs": 0}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": -1}, r"epochs=-1: expected an integer of at least 1"),
        ({"steps": 10}, r"steps=10: with epochs=300: give one of them, and None for the other"),
        ({"epochs": None}, r"steps=None: with epochs=None: give one of them"),
        ({"epochs": None, "steps": 0}, r"steps=0: expected an integer of at least 1"),
        ({"epochs": 1.5, "warmup_epochs": 0}, r"epochs=1.5: expected an integer or None"),
        ({"batch_size": 10, "accumulate": 4}, r"batch_size=10: expected a multiple of accumulate=4"),
        ({"batch_size": 6, "accumulate": 2}, r"batch_size=6: .*even batch"),
        ({"precision": "bfloat16"}, r"precision='bfloat16': expected one of no, bf16, fp16"),
        ({"mixup": -0.1}, r"mixup=-0.1"),
        ({"mixup_prob": 1.1}, r"mixup_prob=1.1: expected a probability"),
        ({"label_smoothing": 1.0}, r"label_smoothing=1.0"),
        ({"drop_path": -0.1}, r"drop_path=-0.1"),
        ({"learning_rate": 0.0}, r"learning_rate=0.0"),
        ({"learning_rate": 1e-6}, r"min_learning_rate=1e-05: expected at most learning_rate=1e-06"),
        ({"epochs": 5}, r"warmup_epochs=5.0: expected fewer than epochs=5"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"clip_grad": 0.0}, r"clip_grad=0.0: .*None to disable clipping"),
        ({"ema_decay": 1.5}, r"ema_decay=1.5"),
        ({"layer_decay": 0.0}, r"layer_decay=0.0"),
        ({"train_crop": "centre"}, r"train_crop='centre': expected one of random-resized, pad"),
        ({"interpolation": "cubic"}, r"interpolation='cubic': expected one of nearest,"),
        ({"bad_images": "ignore"}, r"bad_images='ignore': expected one of refuse, skip"),
        ({"workers": -1}, r"workers=-1"),
        ({"model_args": ("img_size",)}, r"expected key=value.* not 'img_size'"),
        ({"model_args": ("contrast_grid=(4,4",)}, r"'\(4,4' is neither a Python literal nor a word"),
        ({"model_args": ("num_classes=3",)}, r"num_classes follows from the data"),
    ],
)
def test_refused_values_name_the_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassificationRecipe(**changes)  # type: ignore[arg-type]


def test_length_is_in_epochs_or_in_updates() -> None:
    assert replace(ODD, epochs=3, warmup_epochs=0).total_steps(7) == 21
    assert replace(ODD, epochs=None, steps=20).total_steps(7) == 20


def test_recipes_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ODD.epochs = 1  # type: ignore[misc]


def test_model_kwargs_are_literals_or_words() -> None:
    recipe = replace(ODD, model_args=("attention=mhsa", "grid=(4,4)", "bias=False", "rate=1e-3", "n='a=b'"))
    assert recipe.model_kwargs() == {
        "attention": "mhsa",
        "grid": (4, 4),
        "bias": False,
        "rate": 1e-3,
        "n": "a=b",
    }


def test_changes_name_what_decides_the_mathematics() -> None:
    other = replace(ODD, seed=1, epochs=301, workers=7, log_every=1, checkpoint_every=1)
    assert ODD.changes(other) == {"seed": (0, 1), "epochs": (300, 301)}


def test_get_recipe_suggests_the_nearest_name() -> None:
    assert get_recipe("demo") == RECIPES["demo"]()
    with pytest.raises(ValueError, match=r"'imagenet_diet'.*did you mean imagenet_deit"):
        get_recipe("imagenet_diet")
    with pytest.raises(ValueError, match="choose one of demo, fashion_sit, imagenet_deit"):
        get_recipe("???")


def test_every_recipe_is_registered_under_its_name() -> None:
    assert {name: build().name for name, build in RECIPES.items()} == {name: name for name in RECIPES}


FIELDS = [
    (kind, field.name)
    for kind in (ClassificationRecipe, GenerationRecipe)
    for field in dataclasses.fields(kind)
]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=lambda value: getattr(value, "__name__", value))
def test_no_field_takes_a_value_of_another_type(kind: type[TrainingRecipe], name: str) -> None:
    """What a recipe.json or a caller may hold: null, text for a number, a number for text, a list, NaN."""
    default = getattr(kind(), name)
    wrong: list[object] = [["a", 1.5], {"a": 1}, float("nan"), float("inf")]
    if not isinstance(default, str):
        wrong += ["32", True] if not isinstance(default, bool) else ["32", 1]
    if isinstance(default, str | bool | tuple | float):
        wrong.append(None)
    optional = {"vae": "32", "auto_augment": "32", "min_learning_rate": None, "ema_decay": None}
    for value in wrong:
        if name in optional and value in (None, "32"):
            continue
        with pytest.raises(ValueError, match=rf"^{name}=.*: expected"):
            kind(**{name: value})


def test_paths_and_lists_of_python_become_what_json_holds() -> None:
    recipe = ClassificationRecipe(data=Path("photos"), betas=[0.9, 0.95])  # type: ignore[arg-type]
    assert (recipe.data, recipe.betas) == ("./photos", (0.9, 0.95))
    assert ClassificationRecipe.from_json(recipe.to_json()) == recipe
    assert ClassificationRecipe(data=Path("fashion")).data == "./fashion"  # type: ignore[arg-type]
    assert ClassificationRecipe(data=Path("/a/b")).data == "/a/b"  # type: ignore[arg-type]
