"""Recipes for image generation: DiT (diffusion) and SiT (flow). Standard library only."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .training import TrainingRecipe

__all__ = ["PATCH_SIZES", "SIZES", "GenerationRecipe", "fashion_sit", "imagenet_dit", "imagenet_sit"]

Objective = Literal["flow", "diffusion"]
FlowPath = Literal["linear", "gvp", "vp"]
Prediction = Literal["velocity", "score", "noise"]
Weighting = Literal["none", "velocity", "likelihood"]
Space = Literal["latents", "rgb", "grey"]
BadImages = Literal["refuse", "skip"]

SIZES = ("s", "b", "l", "xl")
PATCH_SIZES = (2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class GenerationRecipe(TrainingRecipe):
    """The settings of a generation run; the defaults are common to DiT's and SiT's authors.

    Raises:
        ValueError: A field has a value that cannot be used; the message names the field and what was expected.
    """

    may_change: ClassVar[frozenset[str]] = TrainingRecipe.may_change | {
        "grid_images",
        "grid_steps",
        "grid_guidance",
    }

    model: str = "vca_sit_s_2"
    """Name of the network, as `lineardiff.models.create_dit` takes it."""
    objective: Objective = "flow"
    """"flow" (SiT, a stochastic interpolant) or "diffusion" (DiT, 1000 steps and a learned variance)."""
    path: FlowPath = "linear"
    """Path of the flow from noise to images: "linear", "gvp" or "vp"."""
    prediction: Prediction = "velocity"
    """What the network of a flow predicts: "velocity", "score" or "noise"."""
    weighting: Weighting = "none"
    """Weighting of a flow's loss if it predicts score or noise: "none", "velocity" or "likelihood"."""

    data: str = "fashion"
    """Images: "fashion" (embedded), a folder of images or parquet files, or a Hugging Face dataset; with
    space=latents, the folder that `lineardiff latents` wrote."""
    space: Space = "latents"
    """Space of the samples: "latents" of an autoencoder, or the pixels of "rgb" or "grey" images, in [-1, 1]."""
    vae: str | None = None
    """Folder or hub name of the AutoencoderKL that decodes samples of latents; None draws no such samples."""
    bad_images: BadImages = "refuse"
    """For an image that cannot be decoded: "refuse" stops with its name, "skip" skips it with a warning."""
    image_size: int = 256
    """Side of the square images in pixels; with space=latents, the side of the images that were encoded."""
    hflip: float = 0.5
    """Probability of a horizontal flip, the only augmentation."""
    train_limit: int | None = None
    """Number of training images, drawn by the seed; None uses all."""
    validation_limit: int | None = 1000
    """Number of images of the validation loss, drawn by the seed and kept in memory; None uses all."""

    grid_images: int = 40
    """Number of samples in the grid that each validation draws, always from the same noise; 0 draws none."""
    grid_steps: int = 25
    """Number of steps of the grid's sampler: Heun's method (flow) or DDIM (diffusion)."""
    grid_guidance: float = 4.0
    """Scale of the grid's classifier-free guidance; 1 disables it."""

    epochs: int | None = None
    steps: int | None = 400_000
    batch_size: int = 256
    learning_rate: float = 1e-4
    min_learning_rate: float | None = None
    warmup_epochs: float = 0.0
    weight_decay: float = 0.0
    ema_decay: float | None = 0.9999

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, default in (("path", "linear"), ("prediction", "velocity"), ("weighting", "none")):
            if self.objective == "diffusion" and getattr(self, name) != default:
                raise self.error(name, f"is for objective=flow; leave it at {default}.")
        if self.prediction == "velocity" and self.weighting != "none":
            raise self.error(
                "weighting", "is for prediction=score or noise; the loss of a velocity is not weighted."
            )
        if self.space == "latents":
            for name, only in (("hflip", 0.5), ("train_limit", None)):
                if getattr(self, name) != only:
                    raise self.error(name, f"latents are used as they were written; leave it at {only}.")
        elif self.vae is not None:
            raise self.error("vae", "is for space=latents; pixels need no autoencoder.")
        if not 0 <= self.hflip <= 1:
            raise self.error("hflip", "expected a probability, from 0 to 1.")
        if self.objective == "diffusion" and not 2 <= self.grid_steps <= 1000:
            raise self.error("grid_steps", "expected 2 to 1000 steps for objective=diffusion.")
        for name in ("image_size", "grid_steps"):
            if getattr(self, name) < 1:
                raise self.error(name, "expected an integer of at least 1.")
        if self.grid_images < 0:
            raise self.error("grid_images", "expected a number of samples, 0 for no grid.")
        if self.validation_limit is not None and self.validation_limit < 1:
            raise self.error("validation_limit", "expected at least 1 image, or None for all.")
        taken = self.model_kwargs().keys() & {"num_classes", "in_channels", "sample_size"}
        if taken:
            raise self.error(
                "model_args", f"{', '.join(sorted(taken))} follows from the data and the other fields."
            )


def imagenet_dit(size: str, patch_size: int) -> GenerationRecipe:
    """Train VCA-DiT on ImageNet-1k at 256 pixels with DiT's settings: 400K updates of 256, AdamW at 1e-4, no decay.

    Write the latents once (`lineardiff latents IMAGES --vae stabilityai/sd-vae-ft-ema --output
    latents/imagenet_256`), then start one process for each GPU:

        torchrun --nproc-per-node 8 -m lineardiff train imagenet_dit_s_2 --output runs/dit

    From github.com/facebookresearch/DiT: train.py, README.md. One difference: the authors train in TF32, the
    recipes in bfloat16. Baseline: `--model dit_s_2`. We have not trained it; 400K updates are 102.4 million images:
    divide by your images/s.

    Expected (the paper, 50K samples, not measured here): FID 62.3 for vca_dit_s_2 (DiT 67.2), 92.7 for vca_dit_s_4
    (DiT 97.9), 38.9 for vca_dit_b_2 (DiT 42.9).

    Args:
        size: "s", "b", "l" or "xl".
        patch_size: 2, 4 or 8.

    Raises:
        ValueError: The size or patch size does not exist.
    """
    return _imagenet("dit", size, patch_size, objective="diffusion")


def imagenet_sit(size: str, patch_size: int) -> GenerationRecipe:
    """Train VCA-SiT on ImageNet-1k at 256 pixels with SiT's settings: 400K updates of 256, linear path, velocity.

    Write the latents once (`lineardiff latents IMAGES --vae stabilityai/sd-vae-ft-ema --output
    latents/imagenet_256`), then start one process for each GPU:

        torchrun --nproc-per-node 8 -m lineardiff train imagenet_sit_s_2 --output runs/sit

    From github.com/willisma/SiT: train.py, train_utils.py. One difference: the authors train in TF32, the recipes
    in bfloat16. Baseline: `--model sit_s_2`. We have not trained it; 400K updates are 102.4 million images: divide by
    your images/s.

    Expected (the paper, 50K samples, not measured here): FID 53.0 for vca_sit_s_2 (SiT 57.3), 32.7 for vca_sit_b_2
    (SiT 35.3).

    Args:
        size: "s", "b", "l" or "xl".
        patch_size: 2, 4 or 8.

    Raises:
        ValueError: The size or patch size does not exist.
    """
    return _imagenet("sit", size, patch_size, objective="flow")


def _imagenet(family: str, size: str, patch_size: int, *, objective: Objective) -> GenerationRecipe:
    if size not in SIZES:
        raise ValueError(f"size={size!r}: expected one of {', '.join(SIZES)}.")
    if patch_size not in PATCH_SIZES:
        raise ValueError(f"patch_size={patch_size!r}: expected one of {', '.join(map(str, PATCH_SIZES))}.")
    return GenerationRecipe(
        name=f"imagenet_{family}_{size}_{patch_size}",
        model=f"vca_{family}_{size}_{patch_size}",
        objective=objective,
        data="latents/imagenet_256",
        vae="stabilityai/sd-vae-ft-ema",
        precision="bf16",
        log_every=100,
        validate_every=2,
        checkpoint_every=5000,
    )


def fashion_sit() -> GenerationRecipe:
    """Train a small SiT that draws garments in minutes on two CPU cores, on the embedded 28 x 28 grey images.

    lineardiff train fashion_sit --output runs/fashion_sit

    Baseline: the same with `--model sit_s_4`. It learns pixels and needs no autoencoder. Images are not flipped:
    shoes point to the left.

    Expected: garments in samples/, one class per column; measured validation losses of the averaged weights, one
    run each: 0.2557 (VCA), 0.2634 (`--model sit_s_4`), 0.2509 (with `attention=mhsa_conv`, self-attention and VCA's
    convolution). A cosine replaces the authors' constant rate, as the run is short.
    """
    return GenerationRecipe(
        name="fashion_sit",
        model="vca_sit_s_4",
        model_args=("dim=128", "depth=4", "num_heads=4"),
        space="grey",
        image_size=28,
        hflip=0.0,
        validation_limit=500,
        epochs=6,
        steps=None,
        batch_size=32,
        learning_rate=3e-3,
        min_learning_rate=1e-5,
        warmup_epochs=0.1,
        ema_decay=0.995,
        grid_guidance=2.0,
        workers=1,
        log_every=20,
        checkpoint_every=200,
    )
