"""The autoencoder between images and the latents that DiT and SiT are trained on."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lineardiff.files import fingerprint

if TYPE_CHECKING:
    from diffusers import AutoencoderKL

__all__ = ["LATENT_SCALE", "encode_moments", "fingerprint_of"]

LATENT_SCALE = 0.18215
"""Factor between the VAE's latents and what the networks see, as in the DiT and SiT authors' code."""


@torch.no_grad()
def encode_moments(vae: "AutoencoderKL", images: Tensor) -> Tensor:
    """Return the mean and log-variance of the latents of images and of their mirror images.

    Args:
        vae: An autoencoder of diffusers with C latent channels.
        images: Images (B, 3, H, W), uint8.

    Returns:
        Moments (B, 2, 2C, h, w) in the autoencoder's dtype: [:, 0] of the images, [:, 1] of their mirror images. The
        first C channels hold the mean and the others the log-variance, neither scaled nor clamped.
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
