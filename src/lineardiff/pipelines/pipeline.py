"""The diffusers pipeline of DiT and SiT, from class labels to images, in latent or pixel space."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict
from numbers import Integral
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lineardiff.checks import check_integer
from lineardiff.extras import missing_extra
from lineardiff.generation.denoisers import Denoiser, check_name, guided
from lineardiff.generation.diffusion import GaussianDiffusion
from lineardiff.generation.flow import Interpolant
from lineardiff.generation.flow_samplers import sample_ode, sample_sde
from lineardiff.pipelines.autoencoder import LatentSpace
from lineardiff.pipelines.schedulers import (
    DIFFUSION_METHODS,
    check_scheduler,
    sample_by_scheduler,
    sample_diffusion,
)

try:
    from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput, ModelMixin, SchedulerMixin
    from diffusers.image_processor import VaeImageProcessor
    from diffusers.utils.torch_utils import randn_tensor
    from huggingface_hub import snapshot_download
except ImportError as error:
    raise missing_extra("generate", package="diffusers") from error

__all__ = ["METHODS", "LinearDiffPipeline"]

METHODS = {
    "diffusion": DIFFUSION_METHODS,
    "flow": ("ode-heun", "ode-euler", "ode-midpoint", "ode-dopri5", "sde-euler", "sde-heun"),
}
"""Sampling methods by objective, the default first."""

OUTPUT_TYPES = ("pil", "np", "pt", "latent")

StepCallback = Callable[["LinearDiffPipeline", int, Any, dict[str, Tensor]], dict[str, Tensor] | None]


class LinearDiffPipeline(DiffusionPipeline):
    """Pipeline for class-conditional image generation with DiT or SiT.

    It is saved, loaded and moved like any pipeline of diffusers. To save a scheduler or VAE added later, register it
    with `register_modules(scheduler=...)` instead of assigning it.

    Args:
        transformer: ``transformer(x, t, labels)``, such as :class:`lineardiff.models.dit.DiT`. Its config states
            in_channels, sample_size, num_classes and class_dropout_prob.
        vae: Decodes latents to images; its config states how they are normalised. Without it a network with 1 or 3
            channels generates pixels in [-1, 1], and a network with other channels latents only.
        scheduler: Scheduler of diffusers (DDPM, DDIM, DPMSolverMultistep, ...; FlowMatchEulerDiscrete for flow), used
            by calls without a `method`.
        objective: What the network was trained on: "flow" or "diffusion".
        path, prediction: Of a flow, as in :class:`Interpolant`; unused by diffusion.
        class_names: One name per label, in order, to let calls name classes.
        latent_space: The :class:`LatentSpace` that the network was trained on, as a dict; by default that of the VAE.
            A VAE with other values is refused.

    Raises:
        ValueError: A name is unknown, there is not one distinct class name per class, the VAE has another latent space,
            or the scheduler does not fit the objective.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components: ClassVar = ["vae", "scheduler"]

    def __init__(
        self,
        transformer: ModelMixin,
        vae: AutoencoderKL | None = None,
        scheduler: SchedulerMixin | None = None,
        *,
        objective: str = "flow",
        path: str = "linear",
        prediction: str = "velocity",
        class_names: list[str] | None = None,
        latent_space: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        check_name("objective", objective, tuple(METHODS))
        Interpolant(path=path, prediction=prediction)  # type: ignore[arg-type]  # checks the names
        classes = transformer.config.num_classes
        if class_names is not None and not (
            isinstance(class_names, (list, tuple)) and all(isinstance(name, str) for name in class_names)
        ):
            raise ValueError(f"class_names={class_names!r}; expected a list of strings.")
        if class_names is not None and not len(set(class_names)) == len(class_names) == classes:
            raise ValueError(
                f"{len(class_names)} class_names; expected {classes} different ones, one per class."
            )
        if vae is not None:
            space = LatentSpace.of(vae)
            if space.channels != transformer.config.in_channels:
                raise ValueError(
                    f"the VAE's latents have {space.channels} channels, but the transformer takes "
                    f"{transformer.config.in_channels}; pass the VAE it was trained with, or none for pixels."
                )
            latent_space = asdict(space) if latent_space is None else latent_space
        self.register_modules(transformer=transformer, vae=vae, scheduler=scheduler)
        self.register_to_config(
            objective=objective,
            path=path,
            prediction=prediction,
            class_names=None if class_names is None else list(class_names),
            latent_space=latent_space,
        )
        self._latent_space()
        if scheduler is not None:
            self._check_scheduler()

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs: Any) -> str:
        """Download a repository of the Hugging Face hub into the cache and return its folder.

        Called by :meth:`from_pretrained`. Overridden because diffusers refuses repositories whose transformer is not
        a diffusers class.
        """
        names = ("cache_dir", "force_download", "local_files_only", "token", "revision")
        options = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        return snapshot_download(pretrained_model_name, allow_patterns=["*.json", "*.safetensors"], **options)

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """Load model_index.json and import the modules of this package that it names.

        Called by :meth:`from_pretrained`. diffusers finds classes only in itself and in modules already imported.
        """
        config = super().load_config(*args, **kwargs)
        for part in config.values() if isinstance(config, dict) else ():
            library = part[0] if isinstance(part, list) and len(part) == 2 else None
            if isinstance(library, str) and library.startswith("lineardiff."):
                importlib.import_module(library)
        return config

    @torch.no_grad()
    def __call__(
        self,
        class_labels: Sequence[int | str],
        *,
        guidance_scale: float = 1.0,
        guidance_channels: int | None = None,
        guidance_interval: tuple[float, float] | None = None,
        num_inference_steps: int | None = None,
        method: str | None = None,
        eta: float = 0.0,
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Generate images of the given classes.

        Args:
            class_labels: B labels or names of :attr:`class_names`, one per image.
            guidance_scale: Scale of classifier-free guidance; 1 disables it.
            guidance_channels: Number of leading channels to guide, by default all; the DiT and SiT authors use 3.
            guidance_interval: (lowest, highest) time at which to guide, in the network's times: 0 (images) to 999
                (noise) for diffusion, 0 (noise) to 1 (images) for flow.
            num_inference_steps: By default 250 for "ddpm" and "sde-...", and 50 for other methods and for schedulers.
                "ode-heun", "ode-midpoint" and "sde-heun" evaluate the network twice per step. "ode-dopri5" is
                adaptive.
            method: "ddpm", "ddim" or "ddim-inverse" for diffusion (see :func:`sample_diffusion`); "ode-euler",
                "ode-midpoint", "ode-heun", "ode-dopri5", "sde-euler" or "sde-heun" for flow (see :func:`sample_ode`
                and :func:`sample_sde`; the SDEs use the diffusion "sigma" and the last step "mean", as in the SiT
                authors' script). By default the scheduler is used, or without one "ddpm" or "ode-heun".
                "ddim-inverse" takes clean images or latents as `latents` and returns noise.
            eta: Noise of "ddim", from 0 (none) to 1.
            generator: Generator of the noise, by default torch's global one. A list has one per image and makes each
                image independent of the rest of its batch, except with "ode-dopri5", whose steps depend on the
                batch.
            latents: Noise (B, C, H, W) to start from, by default drawn from the generator.
            output_type: "pil"; "np" (B, H, W, C) or "pt" (B, C, H, W), in [0, 1]; or "latent", (B, C, H, W) as
                generated by the network.
            callback_on_step_end: Called with (pipeline, step, time, tensors) after each step. For diffusion and for
                schedulers, tensors holds "latents", which a returned dict may replace; for flow methods it is empty.
            return_dict: Whether to return an ImagePipelineOutput instead of the tuple (images,).

        Raises:
            ValueError: An argument is invalid, the transformer is in training mode, or the samples are not finite.
        """
        labels = self._labels(class_labels)
        if num_inference_steps is not None:
            check_integer("num_inference_steps", num_inference_steps)
        check_name("output_type", output_type, OUTPUT_TYPES)
        config = self.transformer.config
        if output_type != "latent" and self.vae is None and not self.pixel_space:
            raise ValueError(
                f"latents of {config.in_channels} channels need a VAE to become images; "
                'load the pipeline with vae=..., or pass output_type="latent".'
            )
        if guidance_scale != 1 and config.class_dropout_prob == 0:
            raise ValueError(
                f"guidance_scale={guidance_scale}, but this network has no null label (class_dropout_prob=0); use 1."
            )
        if self.transformer.training:
            raise ValueError("the transformer is in training mode and would drop labels; call its eval().")
        for each in generator if isinstance(generator, list) else [generator]:
            if each is not None and not isinstance(each, torch.Generator):
                raise ValueError(f"generator={generator!r}; expected a torch.Generator or a list of them.")
        if callback_on_step_end is not None and not callable(callback_on_step_end):
            raise ValueError(f"callback_on_step_end={callback_on_step_end!r}; expected a function.")
        if isinstance(generator, list) and len(generator) != len(labels):
            raise ValueError(
                f"{len(generator)} generators for {len(labels)} images; pass one per image, or one for all."
            )

        if method == "ddim-inverse" and (latents is None or output_type != "latent"):
            raise ValueError(
                'method "ddim-inverse" turns latents into noise; pass latents=... and output_type="latent".'
            )

        x = self._start(latents, len(labels), generator)
        denoiser = guided(
            self._predict,
            labels,
            null_label=config.num_classes,
            scale=guidance_scale,
            channels=guidance_channels,
            interval=guidance_interval,
        )
        if method is None and self.scheduler is None:
            method = METHODS[self.config.objective][0]
        if method is not None:
            check_name(f"method of {self.config.objective}", method, METHODS[self.config.objective])
        if num_inference_steps is None and method != "ode-dopri5":
            num_inference_steps = 250 if method is not None and method.startswith(("ddpm", "sde")) else 50
        if method != "ddim" and eta != 0:
            raise ValueError(f'eta={eta} applies to method="ddim" only; leave it at 0.')
        # dopri5 reports its progress in percent
        with self.progress_bar(total=num_inference_steps or 100) as bar:
            if self.config.objective == "flow" and method is not None:
                x = self._sample_flow(
                    denoiser, x, method, num_inference_steps, generator, bar, callback_on_step_end
                )
            else:
                assert num_inference_steps is not None

                def step_end(step: int, time: Tensor, x: Tensor) -> Tensor:
                    bar.update(min(1, bar.total - bar.n))
                    if callback_on_step_end is None:
                        return x
                    return (callback_on_step_end(self, step, time, {"latents": x}) or {}).get("latents", x)

                options: dict[str, Any] = {
                    "num_steps": num_inference_steps,
                    "generator": generator,
                    "step_end": step_end,
                }
                if method is None:
                    self._check_scheduler()
                    x = sample_by_scheduler(self.scheduler, denoiser, x, **options)
                else:
                    variance = "learned_range" if self._learned_variance else "fixed_large"
                    clips = self.pixel_space and method != "ddim-inverse"
                    diffusion = GaussianDiffusion(variance=variance)  # type: ignore[arg-type]
                    x = sample_diffusion(
                        diffusion, denoiser, x, method=method, eta=eta, clip_denoised=clips, **options
                    )
        if not x.isfinite().all():
            raise ValueError(
                "the samples are not finite: the network has diverged, or overflows in low precision (try float32)."
            )
        images = self._decode(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @property
    def class_names(self) -> list[str] | None:
        """Class names by label, which calls may use."""
        return self.config.class_names

    @property
    def pixel_space(self) -> bool:
        """Whether the network generates pixels."""
        latents = self.vae is not None or self.config.latent_space is not None
        return not latents and self.transformer.config.in_channels in (1, 3)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Shape (C, H, W) of the noise of one image."""
        config = self.transformer.config
        size = config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return config.in_channels, height, width

    @property
    def _learned_variance(self) -> bool:
        return self.transformer.out_channels == 2 * self.transformer.config.in_channels

    def _check_scheduler(self) -> None:
        config, flow = self.config, self.config.objective == "flow"
        if flow and (config.path, config.prediction) != ("linear", "velocity"):
            raise ValueError(
                f"a scheduler of diffusers needs path 'linear' and prediction 'velocity', but this model has "
                f"{config.path!r} and {config.prediction!r}; use a method: {', '.join(METHODS['flow'])}."
            )
        check_scheduler(
            self.scheduler, flow=flow, clips=self.pixel_space, learned_variance=self._learned_variance
        )

    def _labels(self, given: Sequence[int | str]) -> Tensor:
        if isinstance(given, (Tensor, np.ndarray)):
            given = given.tolist()  # of a 0-d tensor or array, a number
        if not isinstance(given, Sequence) or isinstance(given, (str, bytes)) or not given:
            raise ValueError(f"class_labels={given!r}; expected a list with one label per image.")
        names = {name: label for label, name in enumerate(self.class_names or ())}
        classes = self.transformer.config.num_classes
        labels = []
        for label in given:
            integer = isinstance(label, Integral) and not isinstance(label, bool)
            known = int(label) if integer else names.get(label, -1) if isinstance(label, str) else -1
            if not 0 <= known < classes:
                few = ", ".join(map(repr, list(names)[:5])) + (", ..." if len(names) > 5 else "")
                raise ValueError(
                    f"unknown class {label!r}; expected 0 to {classes - 1}"
                    + (f" or one of {few}." if names else "; the pipeline has no class names.")
                )
            labels.append(known)
        return torch.tensor(labels, device=self._execution_device)

    def _start(self, latents: Tensor | None, batch_size: int, generator: Any) -> Tensor:
        shape, device = (batch_size, *self.latent_shape), self._execution_device
        if latents is None:
            return randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        if not isinstance(latents, Tensor) or latents.is_complex():
            raise ValueError(f"latents={latents!r}; expected a tensor of real numbers.")
        if not latents.isfinite().all():
            raise ValueError("latents contain NaN or infinity; expected finite numbers.")
        if latents.shape != shape:
            raise ValueError(
                f"latents have shape {tuple(latents.shape)}; expected {shape}, noise for each label."
            )
        return latents.to(device, torch.promote_types(latents.dtype, torch.float32))

    def _predict(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        output = self.transformer(x.to(self.transformer.dtype), t, labels, return_dict=False)[0].to(x.dtype)
        # a flow has no variance to learn
        return output[:, : x.shape[1]] if self.config.objective == "flow" else output

    def _sample_flow(
        self,
        denoiser: Denoiser,
        x: Tensor,
        method: str,
        num_steps: int | None,
        generator: Any,
        bar: Any,
        callback: StepCallback | None,
    ) -> Tensor:
        interpolant = Interpolant(path=self.config.path, prediction=self.config.prediction)
        kind, _, solver = method.partition("-")
        time = x.new_zeros(())

        def timed(x: Tensor, t: Tensor) -> Tensor:
            nonlocal time
            time = t[0]
            return denoiser(x, t)

        def noise(step: int) -> Tensor:
            return randn_tensor(x.shape, generator=generator, device=x.device, dtype=x.dtype)

        def report(step: int, total: int) -> None:
            bar.update(step - bar.n)
            if callback is not None and (callback(self, step - 1, time, {}) or {}):
                raise ValueError(
                    "callback_on_step_end returned tensors, which flow methods do not take; use a scheduler, or "
                    "return {}."
                )

        options: dict[str, Any] = {"method": solver, "num_steps": num_steps, "callback": report}
        if kind == "ode":
            return sample_ode(interpolant, timed, x, **options)
        return sample_sde(interpolant, timed, x, noise=noise, diffusion_form="sigma", **options)

    def _latent_space(self) -> LatentSpace | None:
        """Return the latent space of the VAE, after checking that it matches the network's."""
        stored = self.config.latent_space
        trained = None if stored is None else LatentSpace.read(stored, source="latent_space")
        if self.vae is None:
            return None
        space = LatentSpace.of(self.vae)
        if trained is not None:
            trained.check_same(space, what="the VAE")
        return space

    def _decode(self, x: Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return x
        space = self._latent_space()
        if space is not None:
            x = self.vae.decode(space.denormalize(x.to(self.vae.dtype)), return_dict=False)[0].float()
        return VaeImageProcessor().postprocess(x, output_type=output_type)
