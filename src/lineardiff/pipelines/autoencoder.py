"""The autoencoder between images and the latents that DiT and SiT are trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lineardiff.checks import check_integer, check_number
from lineardiff.files import fingerprint

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

__all__ = ["LatentSpace", "encode_moments", "fingerprint_of"]


@dataclass(frozen=True)
class LatentSpace:
    """Shape and normalisation of an autoencoder's latents, from its config.

    A network is trained on and generates ``(latents - shift_factor) * scaling_factor``, as in diffusers.

    Attributes:
        channels: Number of latent channels.
        downsampling: Ratio of the sides of an image and of its latents.
        scaling_factor, shift_factor: Normalisation; 0.18215 and 0 for Stable Diffusion's autoencoders, which the
            authors of DiT and SiT used.

    Raises:
        ValueError: A value is not a positive number (`shift_factor`: not a finite number).
    """

    channels: int
    downsampling: int
    scaling_factor: float
    shift_factor: float = 0.0

    def __post_init__(self) -> None:
        check_integer("channels", self.channels)
        check_integer("downsampling", self.downsampling)
        check_number("scaling_factor", self.scaling_factor, above=0)
        check_number("shift_factor", self.shift_factor, low=-1e6, high=1e6)

    @classmethod
    def of(cls, vae: "AutoencoderKL") -> "LatentSpace":
        """Return the latent space of an autoencoder.

        Raises:
            ValueError: The config has an invalid value, or a separate normalisation for each channel.
        """
        config = vae.config
        for name in ("latents_mean", "latents_std"):
            if config.get(name) is not None:
                raise ValueError(
                    f"the VAE's config has {name}, a normalisation per channel; only scaling_factor and shift_factor "
                    "are supported."
                )
        shift = config.get("shift_factor")
        return cls(
            channels=config.latent_channels,
            downsampling=2 ** (len(config.block_out_channels) - 1),
            scaling_factor=config.scaling_factor,
            shift_factor=0.0 if shift is None else shift,
        )

    @classmethod
    def read(cls, values: Mapping[str, Any] | None, *, source: str) -> "LatentSpace":
        """Return the latent space stored as a mapping, as `dataclasses.asdict` gives it.

        Raises:
            ValueError: It is missing or invalid; the message names `source`.
        """
        try:
            return cls(**(values or {}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{source} does not describe its latent space ({error}).") from error

    def check_same(self, other: "LatentSpace", *, what: str) -> None:
        """Check that an autoencoder has this latent space.

        Raises:
            ValueError: They differ; the message names the values.
        """
        ours, theirs = vars(self), vars(other)
        differ = [
            f"{name} is {theirs[name]!r}, not {value!r}"
            for name, value in ours.items()
            if value != theirs[name]
        ]
        if differ:
            raise ValueError(
                f"{what} does not fit the network's latents: {'; '.join(differ)}. Use the VAE that the network was "
                "trained with."
            )

    def normalize(self, latents: Tensor) -> Tensor:
        """Convert latents of the autoencoder to those that networks see."""
        return (latents - self.shift_factor) * self.scaling_factor

    def denormalize(self, latents: Tensor) -> Tensor:
        """Convert latents that networks see to those of the autoencoder."""
        return latents / self.scaling_factor + self.shift_factor


@torch.no_grad()
def encode_moments(vae: "AutoencoderKL", images: Tensor) -> Tensor:
    """Return the mean and log-variance of the latents of images and of their mirror images.

    Args:
        vae: An autoencoder of diffusers with C latent channels.
        images: Images (B, 3, H, W), uint8.

    Returns:
        Moments (B, 2, 2C, h, w) in the autoencoder's dtype: [:, 0] of the images, [:, 1] of their mirror images. The
        first C channels hold the mean and the last C the log-variance, neither scaled nor clamped.
    """
    pixels = images.to(vae.device, vae.dtype) / 127.5 - 1
    both = torch.stack([pixels, pixels.flip(3)], dim=1).flatten(0, 1)
    return vae.encode(both).latent_dist.parameters.unflatten(0, (-1, 2))


def fingerprint_of(vae: "AutoencoderKL") -> str:
    """Return a fingerprint of the weights, which distinguishes autoencoders of the same name."""
    state = sorted(vae.state_dict().items())
    return fingerprint(
        part
        for name, value in state
        for part in (name.encode(), value.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    )
