"""From class labels to images: the diffusers pipeline of DiT and SiT, through a VAE or in pixels."""

import importlib
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, ClassVar

import torch
from torch import Tensor

from lineardiff.generation.diffusion import GaussianDiffusion
from lineardiff.generation.flow import Interpolant
from lineardiff.generation.guidance import guided
from lineardiff.generation.noise import Denoiser, check_name
from lineardiff.pipelines.autoencoder import LATENT_SCALE
from lineardiff.pipelines.methods import METHODS, default_steps, sample_by_method
from lineardiff.pipelines.schedulers import check_scheduler, sample_by_scheduler

try:
    from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput, ModelMixin, SchedulerMixin
    from diffusers.image_processor import VaeImageProcessor
    from diffusers.utils.torch_utils import randn_tensor
    from huggingface_hub import snapshot_download
except ImportError as error:
    raise ImportError("LinearDiffPipeline needs diffusers: pip install 'lineardiff[generate]'") from error

OUTPUT_TYPES = ("pil", "np", "pt", "latent")

StepCallback = Callable[["LinearDiffPipeline", int, Any, dict[str, Tensor]], dict[str, Tensor] | None]


class LinearDiffPipeline(DiffusionPipeline):
    """A DiT or SiT with what its samples need: saved, loaded and moved as any pipeline of diffusers. A scheduler or
    VAE that is added later is saved after `register_modules(scheduler=...)`, not after an assignment.

    Args:
        transformer: ``transformer(x, t, labels)`` as :class:`lineardiff.models.dit.DiT`; its config names
            in_channels, sample_size, num_classes and class_dropout_prob.
        vae: Turns latents (divided by 0.18215) into images. None: a network of 1 or 3 channels makes pixels in
            [-1, 1], one of other channels gives latents only.
        scheduler: Of diffusers (DDPM, DDIM, DPMSolverMultistep...; FlowMatchEulerDiscrete for flow), used where
            a call names no method. None: the samplers of this package.
        objective: What the network was trained on: "flow" or "diffusion".
        path, prediction: Of flow, as :class:`Interpolant` takes them; unused by diffusion.
        class_names: One for each label, in order, so that calls may name classes.

    Raises:
        ValueError: An unknown name, class names of another number than the classes, a VAE of other channels, or a
            scheduler that does not fit the objective.
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
    ) -> None:
        super().__init__()
        check_name("objective", objective, tuple(METHODS))
        Interpolant(path=path, prediction=prediction)  # type: ignore[arg-type]  # refuses unknown names
        classes = transformer.config.num_classes
        if class_names is not None and not len(set(class_names)) == len(class_names) == classes:
            raise ValueError(
                f"{len(class_names)} class_names: expected {classes} different ones, one a class"
            )
        if vae is not None and vae.config.latent_channels != transformer.config.in_channels:
            raise ValueError(
                f"the VAE's latents have {vae.config.latent_channels} channels, the transformer takes "
                f"{transformer.config.in_channels}: give the VAE it was trained with, or none for pixels"
            )
        self.register_modules(transformer=transformer, vae=vae, scheduler=scheduler)
        self.register_to_config(
            objective=objective,
            path=path,
            prediction=prediction,
            class_names=None if class_names is None else list(class_names),
        )
        if scheduler is not None:
            self._check_scheduler()

    @classmethod
    def download(cls, pretrained_model_name: str, **kwargs: Any) -> str:
        """A repository of the Hugging Face hub, into the cache; :meth:`from_pretrained` calls it.

        diffusers' own method refuses repositories whose transformer is none of diffusers' classes.
        """
        names = ("cache_dir", "force_download", "local_files_only", "token", "revision")
        options = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
        return snapshot_download(pretrained_model_name, allow_patterns=["*.json", "*.safetensors"], **options)

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> Any:
        """The content of model_index.json; :meth:`from_pretrained` calls it.

        diffusers takes classes only from itself and from modules that are imported already: the modules of this
        package that the file names are imported here.
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
        generator: torch.Generator | list[torch.Generator] | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        callback_on_step_end: StepCallback | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Images of the given classes.

        Args:
            class_labels: B labels or names of :attr:`class_names`, one for each image.
            guidance_scale: Of classifier-free guidance; 1 is none.
            guidance_channels: How many channels are guided; None all, 3 as DiT's and SiT's authors.
            guidance_interval: (lowest, highest) time of guidance in the network's times: 0 to 999 from images to
                noise of diffusion, 0 to 1 from noise to images of flow.
            num_inference_steps: None: 250 for "ddpm" and "sde-...", 50 for the others and for schedulers, of
                which "ode-heun", "ode-midpoint" and "sde-heun" evaluate the network twice a step. "ode-dopri5"
                chooses its own steps.
            method: A sampler of this package ("ddpm" or "ddim" of diffusion; "ode-euler", "ode-midpoint",
                "ode-heun", "ode-dopri5", "sde-euler" or "sde-heun" of flow), see :func:`sample_by_method`. None:
                the scheduler, or without one "ddpm" or "ode-heun".
            generator: Of the noise; None takes torch's global one. A list has one for each image, and makes an
                image independent of the others of its batch, except with "ode-dopri5", which chooses its
                steps by the whole batch.
            latents: (B, C, H, W) noise to start from; None draws it.
            output_type: "pil"; "np" (B, H, W, C) or "pt" (B, C, H, W), in [0, 1]; or "latent", (B, C, H, W) as
                the network makes them.
            callback_on_step_end: Called with (pipeline, step, time, tensors) after each step. With a scheduler
                tensors holds "latents", and a dict that is returned may replace them; with the samplers of this
                package it is empty.
            return_dict: False returns (images,) instead of an ImagePipelineOutput.

        Raises:
            ValueError: Labels, names, sizes or a method that the pipeline does not know, a transformer in training
                mode, or samples that are not finite.
        """
        labels = self._labels(class_labels)
        if num_inference_steps is not None and not isinstance(num_inference_steps, int):
            raise ValueError(f"num_inference_steps={num_inference_steps!r}: expected a whole number")
        check_name("output_type", output_type, OUTPUT_TYPES)
        config = self.transformer.config
        if output_type != "latent" and self.vae is None and not self.pixel_space:
            raise ValueError(
                f"latents of {config.in_channels} channels need a VAE to become images: "
                'load the pipeline with vae=..., or ask for output_type="latent"'
            )
        if guidance_scale != 1 and config.class_dropout_prob == 0:
            raise ValueError(
                f"guidance_scale={guidance_scale}: this network has no null label (class_dropout_prob=0); use 1"
            )
        if self.transformer.training:
            raise ValueError("the transformer is in training mode and would drop labels: call its eval()")
        if isinstance(generator, list) and len(generator) != len(labels):
            raise ValueError(
                f"{len(generator)} generators for {len(labels)} images: give one each, or one for all"
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
        if method is None and self.scheduler is not None:
            x = self._sample_by_scheduler(denoiser, x, num_inference_steps, generator, callback_on_step_end)
        else:
            x = self._sample(denoiser, x, num_inference_steps, method, generator, callback_on_step_end)
        if not x.isfinite().all():
            raise ValueError(
                "the samples are not finite: the network has diverged, or overflows in low precision (try float32)"
            )
        images = self._decode(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    @property
    def class_names(self) -> list[str] | None:
        """The names that calls may use, by label."""
        return self.config.class_names

    @property
    def pixel_space(self) -> bool:
        """Whether the network makes images itself."""
        return self.vae is None and self.transformer.config.in_channels in (1, 3)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the noise of one image."""
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
                f"a scheduler of diffusers needs path 'linear' and prediction 'velocity', this model has "
                f"{config.path!r} and {config.prediction!r}: sample by {', '.join(METHODS['flow'])}"
            )
        check_scheduler(
            self.scheduler, flow=flow, clips=self.pixel_space, learned_variance=self._learned_variance
        )

    def _labels(self, given: Sequence[int | str]) -> Tensor:
        if isinstance(given, str) or not len(given):
            raise ValueError(f"class_labels={given!r}: expected a list with one label for each image")
        names = {name: label for label, name in enumerate(self.class_names or ())}
        classes = self.transformer.config.num_classes
        labels = []
        for label in given.tolist() if isinstance(given, Tensor) else given:
            whole = isinstance(label, Integral) and not isinstance(label, bool)
            known = int(label) if whole else names.get(label, -1) if isinstance(label, str) else -1
            if not 0 <= known < classes:
                few = ", ".join(map(repr, list(names)[:5])) + (", ..." if len(names) > 5 else "")
                raise ValueError(
                    f"unknown class {label!r}: expected 0 to {classes - 1}"
                    + (f" or a name of {few}" if names else ", as the pipeline has no class names")
                )
            labels.append(known)
        return torch.tensor(labels, device=self._execution_device)

    def _start(self, latents: Tensor | None, batch_size: int, generator: Any) -> Tensor:
        shape, device = (batch_size, *self.latent_shape), self._execution_device
        if latents is None:
            return randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        if latents.shape != shape:
            raise ValueError(
                f"latents have shape {tuple(latents.shape)}: expected {shape}, noise for each label"
            )
        return latents.to(device, torch.promote_types(latents.dtype, torch.float32))

    def _predict(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        answer = self.transformer(x.to(self.transformer.dtype), t, labels, return_dict=False)[0].to(x.dtype)
        # of flow the network is trained without a variance
        return answer[:, : x.shape[1]] if self.config.objective == "flow" else answer

    def _sample(
        self,
        denoiser: Denoiser,
        x: Tensor,
        num_steps: int | None,
        method: str | None,
        generator: Any,
        callback: StepCallback | None,
    ) -> Tensor:
        config = self.config
        method = METHODS[config.objective][0] if method is None else method
        process: GaussianDiffusion | Interpolant
        if config.objective == "flow":
            process = Interpolant(path=config.path, prediction=config.prediction)
        else:
            process = GaussianDiffusion(variance="learned_range" if self._learned_variance else "fixed_large")
        time = x.new_zeros(())

        def timed(x: Tensor, t: Tensor) -> Tensor:
            nonlocal time
            time = t[0]
            return denoiser(x, t)

        def noise(step: int) -> Tensor:
            return randn_tensor(x.shape, generator=generator, device=x.device, dtype=x.dtype)

        # dopri5 tells its progress in percent
        with self.progress_bar(total=num_steps or default_steps(method) or 100) as bar:
            done = 0

            def report(step: int, total: int) -> None:
                nonlocal done
                bar.update(step - done)
                done = step
                if callback is not None and (callback(self, step - 1, time, {}) or {}):
                    raise ValueError(
                        "callback_on_step_end returned tensors, which only schedulers take: set one, or return {}"
                    )

            return sample_by_method(
                process,
                timed,
                x,
                method=method,
                noise=noise,
                num_steps=num_steps,
                clip_denoised=self.pixel_space,
                callback=report,
            )

    def _sample_by_scheduler(
        self,
        denoiser: Denoiser,
        x: Tensor,
        num_steps: int | None,
        generator: Any,
        callback: StepCallback | None,
    ) -> Tensor:
        self._check_scheduler()
        num_steps = 50 if num_steps is None else num_steps
        with self.progress_bar(total=num_steps) as bar:

            def step_end(step: int, timestep: Tensor, x: Tensor) -> Tensor:
                bar.update(min(1, num_steps - bar.n))
                if callback is None:
                    return x
                return (callback(self, step, timestep, {"latents": x}) or {}).get("latents", x)

            return sample_by_scheduler(
                self.scheduler, denoiser, x, num_steps=num_steps, generator=generator, step_end=step_end
            )

    def _decode(self, x: Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return x
        if self.vae is not None:
            x = self.vae.decode(x.to(self.vae.dtype) / LATENT_SCALE, return_dict=False)[0].float()
        return VaeImageProcessor().postprocess(x, output_type=output_type)
