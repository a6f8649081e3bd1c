"""Class-conditional generation as a training task: DiT and SiT on latents or pixels."""

import shutil
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils.data import Subset, default_collate
from torchvision import transforms
from torchvision.utils import make_grid

from lineardiff.data import (
    Augmented,
    ImageSplit,
    Transform,
    center_crop,
    check_same_classes,
    open_images,
    subset,
)
from lineardiff.data.latents import Latents, open_latents, sample_moments
from lineardiff.device import autocast, sum_over_processes
from lineardiff.generation import Denoiser, GaussianDiffusion, Interpolant
from lineardiff.models import create_dit
from lineardiff.pipelines.autoencoder import LatentSpace, fingerprint_of
from lineardiff.pipelines.pretrained import load_vae
from lineardiff.recipes import GenerationRecipe
from lineardiff.train.data_record import data_record

if TYPE_CHECKING:
    from lineardiff.models.dit import DiT
    from lineardiff.pipelines.pipeline import LinearDiffPipeline

_GRID_COLUMNS = 10


class GenerationTask:
    """Class-conditional generation, for :func:`lineardiff.train.train`.

    Times, noise, latents drawn from their moments and dropped labels follow from (seed, step, rank), so results depend
    on the number of processes and accumulation steps.

    Attributes:
        model: Network with weights drawn from the seed.
        train_data: Images (C, H, W) in [-1, 1], or moments of latents (2C, h, w), with labels.
        validation: As `train_data`, without mirroring; for latents, a part of `train_data`.
        classes: Class names; a label is an index into them.

    Raises:
        ValueError: The recipe's data or model does not exist, or they do not fit together.
        ImportError: diffusers is not installed.
    """

    repeats = 1

    def __init__(self, recipe: GenerationRecipe) -> None:
        self.recipe = recipe
        self.collate = default_collate
        self.train_data: Augmented | Latents
        self._latent_space: LatentSpace | None = None
        if recipe.space == "latents":
            self._open_latents()
        else:
            self._open_pixels()
        self.model = self._build_model()
        # fail now rather than at the first validation, which may be days later
        self._vae = load_vae(recipe.vae) if recipe.vae is not None else None
        if self._vae is not None and isinstance(self.train_data, Latents):
            written_by = self.train_data.settings.get("fingerprint_of_vae")
            if written_by not in (None, fingerprint_of(self._vae)):
                raise recipe.error(
                    "vae",
                    f"its weights are not those that wrote the latents in {recipe.data} "
                    f"({self.train_data.settings.get('vae')}); pass that autoencoder.",
                )
            assert self._latent_space is not None
            self._latent_space.check_same(LatentSpace.of(self._vae), what=f"vae={recipe.vae}")
        self._objective: Interpolant | GaussianDiffusion
        if recipe.objective == "flow":
            self._objective = Interpolant(
                path=recipe.path, prediction=recipe.prediction, weighting=recipe.weighting
            )
        else:
            learned = self.model.out_channels == 2 * self.model.in_channels
            self._objective = GaussianDiffusion(variance="learned_range" if learned else "fixed_large")

    def data_record(self) -> dict[str, Any]:
        """Return the record of the images or latents."""
        return data_record(**self._sources)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss of images (B, C, H, W) or moments (B, 2C, H, W) at random times, given labels (B,)."""
        data, labels = batch
        # the loop seeds the global CPU generator for this update and this process
        generator = torch.Generator(data.device).manual_seed(int(torch.randint(2**62, ())))
        x, t, noise = self._draw(data, generator)
        losses = self._objective.training_losses(_bind(model, labels), x, t, noise)
        return losses["loss"].mean()

    def validate(self, model: nn.Module) -> dict[str, float]:
        """Return the mean loss and its terms, at the same times and noise in every call; processes share the work."""
        state, device = PartialState(), next(model.parameters()).device
        size = self.recipe.batch_size // (self.recipe.accumulate * state.num_processes)
        batches = list(zip(*(tensor.split(size) for tensor in self._fixed), strict=True))
        sums: dict[str, float] = {}
        for tensors in batches[state.process_index :: state.num_processes]:
            x, labels, t, noise = (tensor.to(device) for tensor in tensors)
            with torch.no_grad(), autocast(device, self.recipe.precision):
                losses = self._objective.training_losses(_bind(model, labels), x, t, noise)
            for name, loss in losses.items():
                sums[name] = sums.get(name, 0.0) + float(loss.double().sum())
        sums = sum_over_processes(sums)
        return {name: total / len(self._fixed[0]) for name, total in sums.items()}

    def picture(self, model: nn.Module) -> Tensor | None:
        """Return a grid of samples that cycle through the classes, from the same noise at every call, or None.

        With ten classes each column is a class.
        """
        recipe = self.recipe
        if not recipe.grid_images or (recipe.space == "latents" and recipe.vae is None):
            return None
        pipeline = self.pipeline(model)
        pipeline.set_progress_bar_config(disable=True)
        shown = min(recipe.grid_images, len(self.classes))
        labels = torch.arange(recipe.grid_images) % shown * len(self.classes) // shown
        generator = torch.Generator().manual_seed(recipe.seed)
        with autocast(pipeline.device, self.recipe.precision):
            images = pipeline(
                labels.tolist(),
                latents=torch.randn((len(labels), *pipeline.latent_shape), generator=generator),
                guidance_scale=recipe.grid_guidance,
                # as the DiT and SiT authors, for the latents they used
                guidance_channels=3 if recipe.space == "latents" and self.model.in_channels == 4 else None,
                num_inference_steps=recipe.grid_steps,
                method="ode-heun" if recipe.objective == "flow" else "ddim",
                output_type="pt",
            ).images
        grid = make_grid(images.float().cpu(), nrow=min(shown, _GRID_COLUMNS), pad_value=1.0)
        return (grid * 255).round().byte()

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write `folder/pipeline`, which `LinearDiffPipeline.from_pretrained` reads."""
        finished, unfinished = folder / "pipeline", folder / "pipeline.unfinished"
        for path in (unfinished, finished):
            if path.exists():
                shutil.rmtree(path)
        self.pipeline(model).save_pretrained(unfinished)
        unfinished.rename(finished)

    def pipeline(self, model: nn.Module) -> "LinearDiffPipeline":
        """Return the diffusers pipeline of a trained network, with the recipe's autoencoder if it names one."""
        from lineardiff.pipelines.pipeline import LinearDiffPipeline

        recipe = self.recipe
        pipeline = LinearDiffPipeline(
            transformer=model,
            vae=self._vae,
            objective=recipe.objective,
            path=recipe.path,
            prediction=recipe.prediction,
            class_names=list(self.classes),
            latent_space=None if self._latent_space is None else asdict(self._latent_space),
        )
        return pipeline.to(next(model.parameters()).device)

    def config(self) -> dict[str, Any]:
        """Return the arguments of `create_dit` and a description of the samples."""
        recipe = self.recipe
        return {
            "architecture": recipe.model,
            "model_args": {**recipe.model_kwargs(), **self._shape(), "num_classes": len(self.classes)},
            "objective": recipe.objective,
            "path": recipe.path,
            "prediction": recipe.prediction,
            "space": recipe.space,
            "image_size": recipe.image_size,
            "classes": self.classes,
        }

    def _open_pixels(self) -> None:
        recipe = self.recipe
        splits = [open_images(recipe.data, s, bad_images=recipe.bad_images) for s in ("train", "validation")]
        check_same_classes(*splits)
        self._sources: dict[str, ImageSplit | Latents] = {"train": splits[0], "validation": splits[1]}
        self.classes = splits[0].classes
        transform = partial(pixel_transform, image_size=recipe.image_size, grey=recipe.space == "grey")
        self.train_data = Augmented(
            subset(splits[0], limit=recipe.train_limit, seed=recipe.seed), transform(hflip=recipe.hflip)
        )
        self.validation = self._fixed_part(Augmented(splits[1], transform(hflip=0.0)))

    def _open_latents(self) -> None:
        recipe = self.recipe
        latents = open_latents(recipe.data)
        space = LatentSpace.read(latents.settings.get("latent_space"), source=recipe.data)
        channels, *sides = latents.moments(0).shape
        if channels != 2 * space.channels or [side * space.downsampling for side in sides] != 2 * [
            recipe.image_size
        ]:
            raise recipe.error(
                "image_size",
                f"{recipe.data} holds moments of {(channels, *sides)} of an autoencoder with {space.channels} channels "
                f"that divides sides by {space.downsampling}; pass the size of the images that were encoded.",
            )
        self._sources = {"train": latents}
        self._latent_space = space
        self.classes = latents.classes
        self.train_data = latents
        self.validation = self._fixed_part(latents)

    def _fixed_part(self, data: Augmented | Latents) -> Subset[tuple[Tensor, int]]:
        limit = self.recipe.validation_limit
        chosen = np.sort(np.random.default_rng(self.recipe.seed).permutation(len(data))[:limit]).tolist()
        return Subset(data, [(index, index) for index in chosen])  # type: ignore[misc]

    def _shape(self) -> dict[str, Any]:
        recipe = self.recipe
        if self._latent_space is not None:
            return {
                "sample_size": recipe.image_size // self._latent_space.downsampling,
                "in_channels": self._latent_space.channels,
            }
        return {"sample_size": recipe.image_size, "in_channels": 1 if recipe.space == "grey" else 3}

    def _build_model(self) -> "DiT":
        recipe = self.recipe
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(recipe.seed)
                model = create_dit(
                    recipe.model, **{**recipe.model_kwargs(), **self._shape()}, num_classes=len(self.classes)
                )
        except TypeError as error:
            raise recipe.error("model_args", f"{recipe.model} does not accept them: {error}.") from error
        if recipe.objective == "flow" and model.out_channels != model.in_channels:
            raise recipe.error(
                "model",
                "it predicts a variance, which a flow does not have; use a SiT, or objective=diffusion.",
            )
        if recipe.grid_images and recipe.grid_guidance != 1 and model.null_label is None:
            raise recipe.error(
                "grid_guidance", "class_dropout_prob=0 builds a network without guidance; set it to 1."
            )
        return model

    def _draw(self, data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Return images or latents (B, C, H, W), times (B,) and noise (B, C, H, W)."""
        x = data
        if self._latent_space is not None:
            mean = data[:, : data.shape[1] // 2]
            x = self._latent_space.normalize(sample_moments(data, _normal(mean, generator)))
        t = self._objective.sample_times(len(x), generator=generator)
        return x, t, _normal(x, generator)

    @cached_property
    def _fixed(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Images or latents, labels, times and noise of the validation loss."""
        data, labels = default_collate([self.validation[index] for index in range(len(self.validation))])
        x, t, noise = self._draw(data, torch.Generator().manual_seed(self.recipe.seed))
        return x, labels, t, noise


def pixel_transform(*, image_size: int, grey: bool = False, hflip: float = 0.5) -> Transform:
    """Build ADM's crop and a random flip: an RGB image to (3, image_size, image_size), or 1 channel, in [-1, 1]."""
    steps = [
        partial(center_crop, image_size=image_size),
        *([transforms.Grayscale()] if grey else []),
        transforms.RandomHorizontalFlip(hflip),
        transforms.ToTensor(),
        transforms.Normalize(0.5, 0.5),
    ]
    return cast(Transform, transforms.Compose(steps))


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, device=generator.device)


def _bind(model: nn.Module, labels: Tensor) -> Denoiser:
    # outside Accelerate, which wraps only the training model, autocast outputs have low precision
    return lambda x, t: model(x, t, labels, return_dict=False)[0].float()
