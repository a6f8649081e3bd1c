"""The fields of a recipe that every objective shares. Standard library only."""

import json
import math
import os
from ast import literal_eval
from dataclasses import asdict, dataclass, fields
from functools import cache
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

__all__ = ["Precision", "TrainingRecipe"]

Recipe = TypeVar("Recipe", bound="TrainingRecipe")

Precision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The part of a recipe that every objective shares: model, schedule, optimizer, precision, logging.

    Each field is also a flag of the command line; `to_json` and `from_json` round-trip exactly. A recipe checks the
    types and choices of its fields, that numbers are finite, and the schedule; the objects that use the other values
    check their ranges.

    Raises:
        ValueError: A field has a value that cannot be used; the message names the field and what was expected.
    """

    may_change: ClassVar[frozenset[str]] = frozenset({"workers", "log_every", "checkpoint_every"})
    """Fields that do not affect the results, so that a run may be resumed with other values of them."""

    name: str = "custom"
    """Name of the recipe, a label in logs and result files."""
    model: str = "vca_deit_tiny_patch16_224"
    """Name of the model, as `timm.create_model` takes it."""
    model_args: tuple[str, ...] = ()
    """Further arguments of the model, key=value with Python literals: attention=mhsa contrast_grid=(4,4)."""

    epochs: int | None = 300
    """Passes over the training images; None if `steps` is given."""
    steps: int | None = None
    """Total number of updates, if epochs is None."""
    batch_size: int = 1024
    """Images per update, over all processes and accumulated batches."""
    accumulate: int = 1
    """Number of parts that the batch of each update is split into, to save memory."""

    optimizer: str = "adamw"
    """Name of the optimizer, as `timm.optim.create_optimizer_v2` takes it."""
    learning_rate: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""
    min_learning_rate: float | None = 1e-5
    """Learning rate at the end of the cosine; None keeps the highest."""
    warmup_learning_rate: float = 1e-6
    """Learning rate of the first update, if there is a warm-up."""
    warmup_epochs: float = 5.0
    """Length of the linear warm-up, which counts toward the epochs."""
    weight_decay: float = 0.05
    """Weight decay of matrices; norms, biases and the parameters in the model's no_weight_decay() are not decayed."""
    layer_decay: float | None = None
    """Factor of the learning rate from each layer to the one before it (0.75 is common in fine-tuning)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the moments, for optimizers that have them."""
    clip_grad: float | None = None
    """Maximum norm of the gradient; None disables clipping."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the weights; None disables it."""

    precision: Precision = "no"
    """Autocast to bf16, or to fp16 with loss scaling (GPU only); "no" trains in float32."""
    compile: bool = False
    """Compile the model with torch.compile."""
    grad_checkpointing: bool = False
    """Recompute the activations in the backward pass, to save memory."""
    workers: int = 2
    """Processes that load and augment images, per training process; 0 loads in the training process."""
    seed: int = 0
    """Seed of the initial weights, the order of the images and the augmentation."""

    log_every: int = 50
    """Number of updates per row of train.csv."""
    validate_every: int = 1
    """Number of epochs between validations; the last epoch is always validated."""
    checkpoint_every: int = 1000
    """Number of updates between checkpoints; the last update always writes one."""

    def __post_init__(self) -> None:
        own_class: Any = type(self)
        for name, kind in _field_types(own_class).items():
            value = getattr(self, name)
            if isinstance(value, os.PathLike):
                # A relative path stays a path where a name has a meaning, as "fashion" and "owner/name" have.
                path = os.fspath(value)
                value = path if path.startswith(("/", ".", "~")) else os.path.join(os.curdir, path)
            elif isinstance(value, list):
                value = tuple(value)
            object.__setattr__(self, name, value)
            if not _fits(value, kind):
                raise self.error(name, f"expected {_describe(kind)}.")
        if (self.epochs is None) == (self.steps is None):
            raise self.error("steps", f"with epochs={self.epochs}: give one of them, and None for the other.")
        length = "epochs" if self.steps is None else "steps"
        for name in (length, "batch_size", "accumulate", "log_every", "validate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise self.error(name, "expected an integer of at least 1.")
        for name in (
            "workers",
            "seed",
            "min_learning_rate",
            "warmup_learning_rate",
            "warmup_epochs",
            "weight_decay",
        ):
            if (getattr(self, name) or 0) < 0:
                raise self.error(name, "expected zero or more.")
        if self.batch_size % self.accumulate:
            raise self.error("batch_size", f"expected a multiple of accumulate={self.accumulate}.")
        if self.learning_rate <= 0:
            raise self.error("learning_rate", "expected more than zero, such as 1e-3.")
        if self.min_learning_rate is not None and self.min_learning_rate > self.learning_rate:
            raise self.error("min_learning_rate", f"expected at most learning_rate={self.learning_rate}.")
        if self.epochs is not None and self.warmup_epochs >= self.epochs:
            raise self.error(
                "warmup_epochs", f"expected fewer than epochs={self.epochs}; lower it or train longer."
            )
        for name in ("layer_decay", "ema_decay"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) <= 1:
                raise self.error(name, "expected a factor above 0 and up to 1, or None to disable it.")
        if self.clip_grad is not None and self.clip_grad <= 0:
            raise self.error(
                "clip_grad", "expected a norm above zero such as 1.0, or None to disable clipping."
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise self.error("betas", "expected two numbers from 0 to below 1, such as 0.9 0.999.")
        self.model_kwargs()

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of updates of the training, given the number in an epoch."""
        return self.steps if self.epochs is None else self.epochs * steps_per_epoch  # type: ignore[return-value]

    def model_kwargs(self) -> dict[str, Any]:
        """Return `model_args` as keyword arguments: Python literals are evaluated, bare words are strings.

        Raises:
            ValueError: An entry is not key=value, or its value is neither a literal nor a bare word.
        """
        kwargs: dict[str, Any] = {}
        for entry in self.model_args:
            key, equals, value = entry.partition("=")
            if not equals or not key.isidentifier():
                raise self.error("model_args", f"expected key=value, such as attention=mhsa, not {entry!r}.")
            try:
                kwargs[key] = literal_eval(value)
            except (ValueError, SyntaxError) as error:
                if not value.replace("-", "_").replace(".", "_").isidentifier():
                    raise self.error(
                        "model_args", f"{value!r} is neither a Python literal nor a word."
                    ) from error
                kwargs[key] = value
        return kwargs

    def changes(self, other: "TrainingRecipe") -> dict[str, tuple[Any, Any]]:
        """Return the fields that affect the results and differ: {field: (value here, value in other)}."""
        here, there = asdict(self), asdict(other)
        names = sorted((here.keys() | there.keys()) - self.may_change)
        return {n: (here.get(n), there.get(n)) for n in names if here.get(n) != there.get(n)}

    def to_json(self) -> str:
        """Return every field, as the text of a recipe.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls: type[Recipe], text: str) -> Recipe:
        """Build a recipe from the text of a recipe.json.

        Raises:
            ValueError: The text is not a JSON object, or has a field or a value that this class refuses.
        """
        values: Any = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a recipe is a JSON object of fields, got a {type(values).__name__}.")
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(
                f"unknown field {', '.join(sorted(unknown))} for a {cls.__name__}: remove it, "
                "or use the version of lineardiff that wrote the recipe."
            )
        return cls(**values)

    def error(self, name: str, expected: str) -> ValueError:
        """Return a ValueError that names field `name`, its value and what was expected of it."""
        return ValueError(f"{name}={getattr(self, name)!r}: {expected}")


@cache
def _field_types(cls: Any) -> dict[str, Any]:
    """Return the types of a recipe's fields."""
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _fits(value: object, kind: Any) -> bool:
    """Return whether a value is of a field's type; an integer is a number, a bool is neither, numbers are finite."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, choice) for choice in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple:
        kinds = inner[:1] * len(value) if inner[-1] is ... and isinstance(value, tuple) else inner
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if isinstance(value, bool) or kind is not float:
        return isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    return isinstance(value, int | float) and math.isfinite(value)


def _describe(kind: Any) -> str:
    """Return a type in words, for error messages."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return " or ".join(map(_describe, inner))
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if origin is tuple:
        return f"words ({_describe(inner[0])} each)" if inner[-1] is ... else f"{len(inner)} finite numbers"
    names = {int: "an integer", float: "a finite number", bool: "True or False", str: "a string"}
    return names.get(kind, "None")
