"""What the training loop reads of a recipe, whatever the objective. Standard library only."""

import json
from ast import literal_eval
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args

Recipe = TypeVar("Recipe", bound="TrainingRecipe")

Precision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The part of a recipe that every objective shares: model, schedule, optimiser, precision, logging.

    The only state of a recipe is its fields, each of them a flag of the command line; `to_json` and
    `from_json` round-trip exactly.

    Raises:
        ValueError: a field has a value that cannot be trained with; the message names the field and the mend.
    """

    may_change: ClassVar[frozenset[str]] = frozenset({"workers", "log_every", "checkpoint_every"})
    """Fields that do not touch the mathematics, so that a run may be resumed with other values of them."""

    name: str = "custom"
    """Name of the recipe, a label in logs and result files."""
    model: str = "vca_deit_tiny_patch16_224"
    """Name of the model, as `timm.create_model` takes it."""
    model_args: tuple[str, ...] = ()
    """Further arguments of the model, key=value with Python literals: attention=mhsa contrast_grid=(4,4)."""

    epochs: int | None = 300
    """Passes over the training images; None where `steps` says how long."""
    steps: int | None = None
    """Updates in all, with epochs None."""
    batch_size: int = 1024
    """Images of one update, over all processes and accumulated batches together."""
    accumulate: int = 1
    """Split each update's batch into this many parts, one after another, to save memory."""

    optimizer: str = "adamw"
    """Optimiser, by its name in `timm.optim.create_optimizer_v2`."""
    learning_rate: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""
    min_learning_rate: float | None = 1e-5
    """Learning rate at the end of the cosine; None stays at the highest."""
    warmup_learning_rate: float = 1e-6
    """Learning rate of the first update, when there is a warm-up."""
    warmup_epochs: float = 5.0
    """Length of the linear warm-up, part of the epochs."""
    weight_decay: float = 0.05
    """Weight decay of matrices; norms, biases and what the model's no_weight_decay() names get none."""
    layer_decay: float | None = None
    """Factor of the learning rate from each layer to the one before it (0.75 is common in fine-tuning)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Moment decays, for optimisers that have them."""
    clip_grad: float | None = None
    """Largest norm of the gradient; None does not clip."""
    ema_decay: float | None = None
    """Keep an exponential moving average of the weights with this decay; None keeps none."""

    precision: Precision = "no"
    """no (float32), bf16, or fp16 with loss scaling (GPU only)."""
    compile: bool = False
    """Compile the model with torch.compile."""
    grad_checkpointing: bool = False
    """Recompute the activations in the backward pass, to save memory."""
    workers: int = 2
    """Processes that load and augment images, for each training process; 0 loads in the training process."""
    seed: int = 0
    """Decides the initial weights, the order of the images and every augmentation."""

    log_every: int = 50
    """Updates between two rows of train.csv."""
    validate_every: int = 1
    """Epochs between two validations; the last epoch is always validated."""
    checkpoint_every: int = 1000
    """Updates between two checkpoints; the last update always writes one."""

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise self.error("steps", f"with epochs={self.epochs}: give one of them, and None for the other")
        length = "epochs" if self.steps is None else "steps"
        for name in (length, "batch_size", "accumulate", "log_every", "validate_every", "checkpoint_every"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise self.error(name, "expected a whole number of at least 1")
        for name in ("workers", "seed"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise self.error(name, "expected a whole number, zero or more")
        for name in ("min_learning_rate", "warmup_learning_rate", "warmup_epochs", "weight_decay"):
            if (getattr(self, name) or 0) < 0:
                raise self.error(name, "expected zero or more")
        if self.batch_size % self.accumulate:
            raise self.error("batch_size", f"expected a multiple of accumulate={self.accumulate}")
        if self.learning_rate <= 0:
            raise self.error("learning_rate", "expected more than zero, such as 1e-3")
        if self.min_learning_rate is not None and self.min_learning_rate > self.learning_rate:
            raise self.error("min_learning_rate", f"expected at most learning_rate={self.learning_rate}")
        if self.epochs is not None and self.warmup_epochs >= self.epochs:
            raise self.error(
                "warmup_epochs", f"expected fewer than epochs={self.epochs}; lower it or train longer"
            )
        for name in ("layer_decay", "ema_decay"):
            if getattr(self, name) is not None and not 0 < getattr(self, name) <= 1:
                raise self.error(name, "expected a factor above 0 and up to 1, or None to do without")
        if self.clip_grad is not None and self.clip_grad <= 0:
            raise self.error("clip_grad", "expected a norm above zero such as 1.0, or None not to clip")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise self.error("betas", "expected two numbers from 0 to below 1, such as 0.9 0.999")
        self._expect_one_of("precision", Precision)
        self.model_kwargs()

    def total_steps(self, steps_per_epoch: int) -> int:
        """Updates of the whole training, with so many in an epoch."""
        return self.steps if self.epochs is None else self.epochs * steps_per_epoch  # type: ignore[return-value]

    def model_kwargs(self) -> dict[str, Any]:
        """`model_args` as keyword arguments: Python literals are evaluated, bare words are strings.

        Raises:
            ValueError: an entry is no key=value, or its value neither a literal nor a bare word.
        """
        kwargs: dict[str, Any] = {}
        for entry in self.model_args:
            key, equals, value = entry.partition("=")
            if not equals or not key.isidentifier():
                raise self.error("model_args", f"expected key=value, such as attention=mhsa, not {entry!r}")
            try:
                kwargs[key] = literal_eval(value)
            except (ValueError, SyntaxError) as error:
                if not value.replace("-", "_").replace(".", "_").isidentifier():
                    raise self.error(
                        "model_args", f"{value!r} is neither a Python literal nor a word"
                    ) from error
                kwargs[key] = value
        return kwargs

    def changes(self, other: "TrainingRecipe") -> dict[str, tuple[Any, Any]]:
        """The fields that decide the mathematics of a run and differ: {field: (here, in other)}."""
        here, there = asdict(self), asdict(other)
        names = sorted((here.keys() | there.keys()) - self.may_change)
        return {n: (here.get(n), there.get(n)) for n in names if here.get(n) != there.get(n)}

    def to_json(self) -> str:
        """Every field, as the text of a recipe.json."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls: type[Recipe], text: str) -> Recipe:
        """The recipe of a recipe.json.

        Raises:
            ValueError: the text is no JSON object, or has a field or a value that this class refuses.
        """
        values: Any = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"a recipe is a JSON object of fields, got a {type(values).__name__}")
        unknown = values.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(
                f"unknown field {', '.join(sorted(unknown))} for a {cls.__name__}: remove it, "
                "or use the version of lineardiff that wrote the recipe"
            )
        try:
            kwargs: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
            return cls(**kwargs)
        except TypeError as error:
            raise ValueError(f"a field of the recipe has the wrong type: {error}") from error

    def error(self, name: str, expected: str) -> ValueError:
        """A ValueError that names field `name`, its value and what was expected of it."""
        return ValueError(f"{name}={getattr(self, name)!r}: {expected}")

    def _expect_one_of(self, name: str, literal: Any) -> None:
        if getattr(self, name) not in get_args(literal):
            raise self.error(name, f"expected one of {', '.join(get_args(literal))}")
