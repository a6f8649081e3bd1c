"""Stochastic interpolants between noise (t = 0) and data (t = 1): losses, velocity and score.

Source: Ma et al., "SiT", arXiv 2401.08740.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lineardiff.generation.denoisers import Denoiser, check_name, expand, mean_per_sample
from lineardiff.generation.paths import PATHS, FlowPath, PathCoefficients

__all__ = ["DiffusionForm", "Interpolant", "Prediction", "Weighting"]

Prediction = Literal["velocity", "score", "noise"]
Weighting = Literal["none", "velocity", "likelihood"]
DiffusionForm = Literal["constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing"]

SINGULAR_EPS = 1e-3
"""Distance kept from a singular end in sampling, as in the SiT authors' code."""


class Interpolant:
    """A flow from noise to data: its path, what the network predicts, and the training loss.

    Args:
        path: "linear" (alpha = t, sigma = 1 - t), "gvp" (sine and cosine) or "vp" (variance preserving).
        prediction: What the denoiser returns: the velocity dx_t/dt, the score, or the noise x_0.
        weighting: Weighting of the loss of a score or noise prediction: "none", "velocity" (proportional to the loss
            of the implied velocity) or "likelihood".
        train_eps: Distance kept from the ends of [0, 1] in training. Defaults to the authors' choice: 1e-5 on the
            VP path; on other paths 1e-3 for score and noise and 0 for velocity.
        sample_eps: Distance kept from the ends of [0, 1] in sampling. Defaults to the authors' choice: 1e-3 on the VP
            path and for score and noise, 0 for velocity on other paths, except where an SDE needs more
            (see :meth:`sample_interval`).

    On the VP path the distances apply to t = 1 only, as nothing is singular at t = 0.

    Raises:
        ValueError: A name is unknown, the velocity loss is given a weighting, or an epsilon is outside [0, 0.5) or 0
            where the path or the prediction is infinite at an end.
    """

    def __init__(
        self,
        *,
        path: FlowPath = "linear",
        prediction: Prediction = "velocity",
        weighting: Weighting = "none",
        train_eps: float | None = None,
        sample_eps: float | None = None,
    ) -> None:
        check_name("path", path, get_args(FlowPath))
        check_name("prediction", prediction, get_args(Prediction))
        check_name("weighting", weighting, get_args(Weighting))
        if prediction == "velocity" and weighting != "none":
            raise ValueError(
                f"weighting {weighting!r} requires prediction 'score' or 'noise'; the velocity loss takes 'none'."
            )
        self.path: FlowPath = path
        self.prediction: Prediction = prediction
        self.weighting: Weighting = weighting
        self._regular = prediction == "velocity" and path != "vp"
        for name, eps in (("train_eps", train_eps), ("sample_eps", sample_eps)):
            if eps is not None and not (0 <= eps < 0.5 and (eps > 0 or self._regular)):
                raise ValueError(
                    f"{name}={eps}; expected a number in [0, 0.5), above 0 for prediction {prediction!r} on path "
                    f"{path!r} (only the velocity on 'linear' and 'gvp' is finite at both ends)."
                )
        default = 1e-5 if path == "vp" else 0.0 if self._regular else SINGULAR_EPS
        self.train_eps = default if train_eps is None else train_eps
        self.sample_eps = sample_eps

    def at(self, t: Tensor) -> PathCoefficients:
        """Return alpha, sigma and their derivatives at times t, each of t's shape."""
        return PATHS[self.path](t)

    def train_interval(self) -> tuple[float, float]:
        """Return the (first, last) time of training."""
        return (0.0 if self.path == "vp" else self.train_eps), 1 - self.train_eps

    def sample_interval(
        self, *, diffusion_form: DiffusionForm | None = None, last_step_size: float = 0.0
    ) -> tuple[float, float]:
        """Return the (first, last) time of sampling.

        When `sample_eps` is None, the SDE of a velocity model keeps 1e-3 from t = 0 if its diffusion is "sbdm", which
        is infinite there, and from t = 1, where a velocity does not determine the score, if it has no last step.

        Args:
            diffusion_form: Diffusion of the SDE; None for the ODE.
            last_step_size: Length of the SDE's last step, which starts at the last time.
        """
        if self.sample_eps is not None:
            first = last = self.sample_eps
        elif self._regular:
            first = SINGULAR_EPS if diffusion_form == "sbdm" else 0.0
            last = SINGULAR_EPS if diffusion_form is not None else 0.0
        else:
            first = last = SINGULAR_EPS
        return (0.0 if self.path == "vp" else first), 1 - (last_step_size or last)

    def sample_times(self, batch_size: int, *, generator: torch.Generator) -> Tensor:
        """Draw training times uniformly over their interval: (batch_size,) float32, on the generator's device."""
        first, last = self.train_interval()
        uniform = torch.rand(batch_size, generator=generator, device=generator.device)
        return first + (last - first) * uniform

    def mix(self, x1: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return x_t of data x1 (B, C, H, W) and noise (B, C, H, W) at times t (B,)."""
        p = self.at(expand(t, x1))
        return p.alpha * x1 + p.sigma * noise

    def target_velocity(self, x1: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return dx_t/dt for the arguments of :meth:`mix`."""
        p = self.at(expand(t, x1))
        return p.d_alpha * x1 + p.d_sigma * noise

    def training_losses(self, denoiser: Denoiser, x1: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Compute the loss of each sample.

        Args:
            denoiser: The network being trained; returns (B, C, H, W).
            x1: Data (B, C, H, W).
            t: Times (B,), as from :meth:`sample_times`.
            noise: Standard normal noise (B, C, H, W).

        Returns:
            {"loss": (B,)}.

        Raises:
            ValueError: The denoiser's output does not have the shape of x1.
        """
        output = self.evaluate(denoiser, self.mix(x1, t, noise), t)
        if self.prediction == "velocity":
            return {"loss": mean_per_sample((output - self.target_velocity(x1, t, noise)).square())}
        p = self.at(t)
        weights = {
            "none": torch.ones_like(t),
            "velocity": (p.score_weight / p.sigma).square(),
            "likelihood": p.score_weight / p.sigma.square(),
        }
        if self.prediction == "noise":
            error = output - noise
        else:
            error = expand(p.sigma, x1) * output + noise
        return {"loss": weights[self.weighting] * mean_per_sample(error.square())}

    def evaluate(self, denoiser: Denoiser, x: Tensor, t: Tensor) -> Tensor:
        """Return the denoiser's output, after checking that it has the shape of x."""
        output = denoiser(x, t)
        if output.shape != x.shape:
            raise ValueError(
                f"the denoiser returned {tuple(output.shape)} for x of {tuple(x.shape)}; an interpolant needs equal "
                "shapes (drop the channels of a learned variance)."
            )
        return output

    def velocity(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the drift of the probability-flow ODE implied by the output at x_t (B, C, H, W) and t (B,)."""
        if self.prediction == "velocity":
            return output
        p = self.at(expand(t, x))
        return p.d_log_alpha * x + p.score_weight * self.score(output, x, t)

    def score(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Return the gradient of log p_t(x) implied by the output at x_t (B, C, H, W) and t (B,)."""
        if self.prediction == "score":
            return output
        p = self.at(expand(t, x))
        if self.prediction == "noise":
            return -output / p.sigma
        # solved for the score after multiplying by alpha / d_alpha, which keeps t = 0 regular
        ratio = p.alpha / p.d_alpha
        return (ratio * output - x) / (p.sigma * (p.sigma - ratio * p.d_sigma))

    def diffusion(self, t: Tensor, form: DiffusionForm, *, norm: float = 1.0) -> Tensor:
        """Return w(t) of the SDE dx = (velocity + w score) dt + sqrt(2 w) dW.

        Args:
            t: Times of any shape.
            form: "constant", "sbdm" (the diffusion of score-based models), "sigma", "linear" (1 - t), "decreasing"
                ((1 + norm cos pi t)^2 / 4) or "increasing-decreasing" (sin^2 pi t).
            norm: Factor of w; in "decreasing" factor of the cosine, as in the authors' code.

        Returns:
            w(t), of t's shape.

        Raises:
            ValueError: The form is unknown, or `norm` is negative or not finite.
        """
        check_name("diffusion form", form, get_args(DiffusionForm))
        if not 0 <= norm < math.inf:
            raise ValueError(f"norm={norm}; expected a number of at least 0.")
        if form == "constant":
            return torch.full_like(t, norm)
        if form == "sbdm":
            return norm * self.at(t).score_weight
        if form == "sigma":
            return norm * self.at(t).sigma
        if form == "linear":
            return norm * (1 - t)
        if form == "decreasing":
            return 0.25 * (1 + norm * torch.cos(torch.pi * t)).square()
        return norm * torch.sin(torch.pi * t).square()
