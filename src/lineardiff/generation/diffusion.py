"""Gaussian diffusion with linear betas: training losses and the posterior, from float64 tables.

Sources: Ho et al., "Denoising Diffusion Probabilistic Models", arXiv 2006.11239; Nichol and Dhariwal, "Improved
Denoising Diffusion Probabilistic Models", arXiv 2102.09672 (learned range, hybrid loss, respacing).
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lineardiff.checks import check_integer
from lineardiff.generation.denoisers import Denoiser, check_name, expand, mean_per_sample

__all__ = ["Denoised", "GaussianDiffusion", "Posterior", "Variance", "discrete_log_likelihood", "gaussian_kl"]

Variance = Literal["learned_range", "fixed_small", "fixed_large"]


class Posterior(NamedTuple):
    """A Gaussian over x_{t-1}: mean (B, C, H, W), variance and log-variance that broadcast with it."""

    mean: Tensor
    variance: Tensor
    log_variance: Tensor


class Denoised(NamedTuple):
    """p(x_{t-1} | x_t) and the clean image implied by a denoiser's output; all broadcast with (B, C, H, W)."""

    mean: Tensor
    variance: Tensor
    log_variance: Tensor
    x0: Tensor


class GaussianDiffusion:
    """The Markov chain x_t = sqrt(1 - beta_t) x_{t-1} + sqrt(beta_t) noise, and its learned reverse.

    Steps are numbered t = 0 ... T - 1 within the chain. The denoiser receives ``timesteps[t]``, which differs from t
    in a respaced chain (see :meth:`respaced`), and predicts the noise. With variance "learned_range" its output has
    2C channels, the second half of which interpolates the log-variance between its bounds. diffusers' schedulers
    sample from the chain, see :mod:`lineardiff.pipelines.schedulers`.

    Args:
        variance: Variance of the reverse step: "learned_range"; or, for a denoiser with C output channels, the lower
            bound ("fixed_small", the variance of the posterior) or the upper one ("fixed_large", beta).
        num_steps: Length of the training chain; betas increase from 0.1 / num_steps to 20 / num_steps.
        timesteps: Increasing steps of the training chain to keep, by default all.

    Attributes:
        timesteps: (T,) int64.
        betas, alphas_cumprod, alphas_cumprod_prev: (T,) float64, of this chain.

    Raises:
        ValueError: The variance is unknown, num_steps is at most 20 (a beta would exceed 1), or timesteps are fewer
            than 2, not increasing or outside the training chain.
    """

    def __init__(
        self,
        *,
        variance: Variance = "learned_range",
        num_steps: int = 1000,
        timesteps: Sequence[int] | None = None,
    ) -> None:
        check_name("variance", variance, get_args(Variance))
        if num_steps <= 20:
            raise ValueError(f"num_steps={num_steps}; expected more than 20, so that every beta is below 1.")
        kept = list(range(num_steps)) if timesteps is None else [int(t) for t in timesteps]
        increasing = all(a < b for a, b in pairwise(kept))
        if len(kept) < 2 or not increasing or kept[0] < 0 or kept[-1] >= num_steps:
            raise ValueError(
                f"{len(kept)} timesteps {kept[:3]}...; expected at least 2, increasing, from 0 to {num_steps - 1}."
            )
        self.variance: Variance = variance
        self.num_steps = num_steps
        self.timesteps = torch.tensor(kept)

        f64 = torch.float64
        training_betas = torch.linspace(0.1 / num_steps, 20 / num_steps, num_steps, dtype=f64)
        self.alphas_cumprod = (1 - training_betas).cumprod(0)[self.timesteps]
        self.alphas_cumprod_prev = torch.cat([torch.ones(1, dtype=f64), self.alphas_cumprod[:-1]])
        self.betas = 1 - self.alphas_cumprod / self.alphas_cumprod_prev
        noise_variance, noise_variance_prev = 1 - self.alphas_cumprod, 1 - self.alphas_cumprod_prev
        posterior_variance = self.betas * noise_variance_prev / noise_variance
        # the posterior variance of the first step is 0; its logarithm is replaced by the second step's
        log_small = torch.cat([posterior_variance[1:2], posterior_variance[1:]]).log()
        self._tables = {
            "timesteps": self.timesteps,
            "signal": self.alphas_cumprod.sqrt(),
            "noise": noise_variance.sqrt(),
            "posterior_x0": self.betas * self.alphas_cumprod_prev.sqrt() / noise_variance,
            "posterior_x": noise_variance_prev * (1 - self.betas).sqrt() / noise_variance,
            "posterior_variance": posterior_variance,
            "log_small": log_small,
            "log_large": self.betas.log(),
            "log_fixed_large": torch.cat([log_small[:1], self.betas[1:].log()]),
        }
        self._on_device: dict[tuple[str, torch.device], Tensor] = {}

    def __len__(self) -> int:
        """Return T, the number of steps of this chain."""
        return len(self.timesteps)

    def respaced(self, steps: int | Sequence[int]) -> "GaussianDiffusion":
        """Return the chain over some of the training steps, with the same marginals.

        Args:
            steps: Number of steps, evenly spaced from the first training step to the last as in the DiT authors' 250
                steps; or the increasing training steps themselves.

        Raises:
            ValueError: The number of steps is outside [2, num_steps], or the steps are invalid.
        """
        if not isinstance(steps, Sequence):
            check_integer("num_steps", steps, minimum=2)
            if steps > self.num_steps:
                raise ValueError(
                    f"num_steps={steps}; expected 2 to {self.num_steps}, the length of the training chain."
                )
            stride = (self.num_steps - 1) / (steps - 1)
            steps = [round(i * stride) for i in range(steps)]
        return GaussianDiffusion(variance=self.variance, num_steps=self.num_steps, timesteps=steps)

    def _at(self, name: str, t: Tensor, x: Tensor | None = None) -> Tensor:
        """Return a table's entries at t (B,), in the dtype and shape of x."""
        key = (name, t.device)
        if key not in self._on_device:
            table = self._tables[name]
            # MPS has no float64
            narrow = table.is_floating_point() and t.device.type == "mps"
            self._on_device[key] = table.to(t.device, torch.float32 if narrow else table.dtype)
        entries = self._on_device[key][t]
        return entries if x is None else expand(entries.to(torch.promote_types(x.dtype, torch.float32)), x)

    def sample_times(self, batch_size: int, *, generator: torch.Generator) -> Tensor:
        """Draw training steps uniformly: (batch_size,) int64, on the generator's device."""
        return torch.randint(len(self), (batch_size,), generator=generator, device=generator.device)

    def q_sample(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return x_t of images x0 (B, C, H, W) and noise (B, C, H, W) at steps t (B,)."""
        _check_steps(t, x0)
        return self._at("signal", t, x0) * x0 + self._at("noise", t, x0) * noise

    def q_posterior(self, x0: Tensor, x: Tensor, t: Tensor) -> Posterior:
        """Return q(x_{t-1} | x_t, x_0) for images x0 and noised images x, both (B, C, H, W), at steps t (B,)."""
        return Posterior(
            self._at("posterior_x0", t, x) * x0 + self._at("posterior_x", t, x) * x,
            self._at("posterior_variance", t, x),
            self._at("log_small", t, x),
        )

    def p_mean_variance(self, denoiser: Denoiser, x: Tensor, t: Tensor) -> Denoised:
        """Evaluate the denoiser once and return p(x_{t-1} | x_t).

        Args:
            denoiser: Called with x and the training steps ``timesteps[t]``, (B,) int64.
            x: Noised images (B, C, H, W).
            t: Steps of this chain, (B,) int64.

        Raises:
            ValueError: t is not (B,) int64, or the output does not have 2C channels ("learned_range") or C (otherwise).
        """
        return self._read(self._evaluate(denoiser, x, t), x, t)

    def _evaluate(self, denoiser: Denoiser, x: Tensor, t: Tensor) -> Tensor:
        _check_steps(t, x)
        output = denoiser(x, self._at("timesteps", t))
        channels = (2 if self.variance == "learned_range" else 1) * x.shape[1]
        if output.shape != (len(x), channels, *x.shape[2:]):
            raise ValueError(
                f"the denoiser returned {tuple(output.shape)} for x of {tuple(x.shape)}; variance {self.variance!r} "
                f"needs {channels} channels."
            )
        return output

    def _read(self, output: Tensor, x: Tensor, t: Tensor) -> Denoised:
        channels = x.shape[1]
        x0 = (x - self._at("noise", t, x) * output[:, :channels]) / self._at("signal", t, x)
        posterior = self.q_posterior(x0, x, t)
        log_variance = posterior.log_variance
        if self.variance == "learned_range":
            fraction = (output[:, channels:] + 1) / 2
            log_variance = fraction * self._at("log_large", t, x) + (1 - fraction) * log_variance
        elif self.variance == "fixed_large":
            log_variance = self._at("log_fixed_large", t, x)
        return Denoised(posterior.mean, log_variance.exp(), log_variance, x0)

    def training_losses(self, denoiser: Denoiser, x0: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Compute the hybrid loss of each sample: the squared error of the noise plus the variational bound.

        The bound trains the variance only: it has no gradient through the mean.

        Args:
            denoiser: The network being trained.
            x0: Images or latents (B, C, H, W).
            t: Steps (B,) int64, as from :meth:`sample_times`.
            noise: Standard normal noise (B, C, H, W).

        Returns:
            {"loss", "mse", "vb"}, each (B,), with loss = mse + vb and vb in bits per dimension; {"loss", "mse"} with a
            fixed variance.

        Raises:
            ValueError: As in :meth:`p_mean_variance`.
        """
        x = self.q_sample(x0, t, noise)
        output = self._evaluate(denoiser, x, t)
        channels = x.shape[1]
        mse = mean_per_sample((output[:, :channels] - noise).square())
        if self.variance != "learned_range":
            return {"loss": mse, "mse": mse}
        frozen = torch.cat([output[:, :channels].detach(), output[:, channels:]], dim=1)
        model = self._read(frozen, x, t)
        truth = self.q_posterior(x0, x, t)
        nats = torch.where(
            expand(t == 0, x),
            -discrete_log_likelihood(x0, mean=model.mean, log_std=0.5 * model.log_variance),
            gaussian_kl(truth.mean, truth.log_variance, model.mean, model.log_variance),
        )
        vb = mean_per_sample(nats) / math.log(2)
        return {"loss": mse + vb, "mse": mse, "vb": vb}


def _check_steps(t: Tensor, x: Tensor) -> None:
    if t.dtype != torch.int64 or t.shape != x.shape[:1]:
        raise ValueError(f"t is {t.dtype} of shape {tuple(t.shape)}; expected int64 of shape ({len(x)},).")


def gaussian_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """Return KL(N(mean1, exp(log_variance1)) || N(mean2, exp(log_variance2))) in nats, elementwise."""
    ratio = torch.exp(log_variance1 - log_variance2)
    distance = (mean1 - mean2).square() * torch.exp(-log_variance2)
    return 0.5 * (ratio + distance - 1 + log_variance2 - log_variance1)


def discrete_log_likelihood(x: Tensor, *, mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the log-probability in nats, elementwise, of the 8-bit level of x under a Gaussian.

    Bins are 2/255 wide; the bins of the lowest (-1) and highest (1) level extend to infinity. Probabilities are clamped
    at 1e-12. As in the code of DDPM, Improved DDPM and DiT, the normal distribution function is approximated by a tanh,
    to 3e-4.
    """
    inverse_std = torch.exp(-log_std)
    upper = _normal_cdf(inverse_std * (x - mean + 1 / 255))
    lower = _normal_cdf(inverse_std * (x - mean - 1 / 255))
    upper = torch.where(x > 0.999, torch.ones_like(upper), upper)
    lower = torch.where(x < -0.999, torch.zeros_like(lower), lower)
    return (upper - lower).clamp(min=1e-12).log()


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
