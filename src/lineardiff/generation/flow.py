"""Stochastic interpolants between noise (t = 0) and data (t = 1): losses, velocity and score.

Source: Ma et al., "SiT", arXiv 2401.08740.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from lineardiff.generation.noise import Denoiser, check_name, expand, mean_per_sample
from lineardiff.generation.paths import PATHS, Path, PathName

Prediction = Literal["velocity", "score", "noise"]
Weighting = Literal["none", "velocity", "likelihood"]
DiffusionForm = Literal["constant", "sbdm", "sigma", "linear", "decreasing", "increasing-decreasing"]

SINGULAR_EPS = 1e-3
"""Kept off a singular end when sampling; as the authors of SiT."""


class Interpolant:
    """What a network predicts on the way from noise to data, and the loss it is trained with.

    Args:
        path: "linear" (alpha = t, sigma = 1 - t), "gvp" (sine and cosine) or "vp" (variance preserving).
        prediction: What the denoiser returns: the velocity dx_t/dt, the score, or the noise x_0.
        weighting: Of the loss of score and noise: "none", "velocity" (makes it the loss of the velocity that
            follows from them, but for a factor) or "likelihood".
        train_eps: Distance kept from the ends of [0, 1] in training. None is the authors' choice: 1e-5 on the
            VP path; 1e-3 for score and noise on the others, 0 for the velocity.
        sample_eps: The same in sampling. None is the authors' choice: 1e-3 on the VP path and for score and
            noise, 0 for the velocity on the others, save where an SDE needs more (:meth:`sample_interval`).

    On the VP path the epsilons are kept from t = 1 alone: nothing is singular at t = 0.

    Raises:
        ValueError: An unknown name; a weighting of the velocity's loss; an epsilon that is no number in
            [0, 0.5), or that is 0 where the path or the prediction is infinite at an end.
    """

    def __init__(
        self,
        *,
        path: PathName = "linear",
        prediction: Prediction = "velocity",
        weighting: Weighting = "none",
        train_eps: float | None = None,
        sample_eps: float | None = None,
    ) -> None:
        check_name("path", path, get_args(PathName))
        check_name("prediction", prediction, get_args(Prediction))
        check_name("weighting", weighting, get_args(Weighting))
        if prediction == "velocity" and weighting != "none":
            raise ValueError(
                f"weighting {weighting!r} is for prediction 'score' or 'noise'; the velocity's loss takes 'none'"
            )
        self.path: PathName = path
        self.prediction: Prediction = prediction
        self.weighting: Weighting = weighting
        self._regular = prediction == "velocity" and path != "vp"
        for name, eps in (("train_eps", train_eps), ("sample_eps", sample_eps)):
            if eps is not None and not (0 <= eps < 0.5 and (eps > 0 or self._regular)):
                raise ValueError(
                    f"{name}={eps}: expected a number in [0, 0.5), above 0 for prediction {prediction!r} on path "
                    f"{path!r} (only the velocity on 'linear' and 'gvp' is finite at both ends)"
                )
        default = 1e-5 if path == "vp" else 0.0 if self._regular else SINGULAR_EPS
        self.train_eps = default if train_eps is None else train_eps
        self.sample_eps = sample_eps

    def at(self, t: Tensor) -> Path:
        """alpha, sigma and their derivatives at times t, each of t's shape."""
        return PATHS[self.path](t)

    def train_interval(self) -> tuple[float, float]:
        """The times of training, (first, last)."""
        return (0.0 if self.path == "vp" else self.train_eps), 1 - self.train_eps

    def sample_interval(
        self, *, diffusion_form: DiffusionForm | None = None, last_step_size: float = 0.0
    ) -> tuple[float, float]:
        """The times of sampling, (first, last).

        Args:
            diffusion_form: That of the SDE; None for the ODE.
            last_step_size: Length of the SDE's last step, which starts at the last time.

        With `sample_eps` None, the SDE of a velocity model keeps 1e-3 from t = 0 when its diffusion is "sbdm",
        which is infinite there, and from t = 1, where no score follows from a velocity, when it has no last step.
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
        """Times of training, uniform over their interval: (batch_size,) float32, on the generator's device."""
        first, last = self.train_interval()
        uniform = torch.rand(batch_size, generator=generator, device=generator.device)
        return first + (last - first) * uniform

    def mix(self, x1: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """x_t of data x1 (B, C, H, W) and noise (B, C, H, W) at times t (B,)."""
        p = self.at(expand(t, x1))
        return p.alpha * x1 + p.sigma * noise

    def target_velocity(self, x1: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """dx_t/dt for the same arguments."""
        p = self.at(expand(t, x1))
        return p.d_alpha * x1 + p.d_sigma * noise

    def training_losses(self, denoiser: Denoiser, x1: Tensor, t: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """The loss of each sample.

        Args:
            denoiser: What is trained; returns (B, C, H, W).
            x1: (B, C, H, W) data.
            t: (B,) times, as from :meth:`sample_times`.
            noise: (B, C, H, W) standard normal.

        Returns:
            {"loss": (B,)}.

        Raises:
            ValueError: The denoiser's answer is not of x1's shape.
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
        """The denoiser's answer, which must have x's shape."""
        output = denoiser(x, t)
        if output.shape != x.shape:
            raise ValueError(
                f"the denoiser returned {tuple(output.shape)} for x of {tuple(x.shape)}: an interpolant needs equal "
                "shapes (drop the channels of a learned variance)"
            )
        return output

    def velocity(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The drift of the probability-flow ODE that follows from the denoiser's answer at x_t (B, C, H, W), t (B,)."""
        if self.prediction == "velocity":
            return output
        p = self.at(expand(t, x))
        return p.d_log_alpha * x + p.score_weight * self.score(output, x, t)

    def score(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The gradient of log p_t(x) that follows from the denoiser's answer at x_t (B, C, H, W), t (B,)."""
        if self.prediction == "score":
            return output
        p = self.at(expand(t, x))
        if self.prediction == "noise":
            return -output / p.sigma
        # solved for the score after multiplication by alpha / d_alpha, so that t = 0 is regular
        ratio = p.alpha / p.d_alpha
        return (ratio * output - x) / (p.sigma * (p.sigma - ratio * p.d_sigma))

    def diffusion(self, t: Tensor, form: DiffusionForm, *, norm: float = 1.0) -> Tensor:
        """w(t) in the SDE dx = (velocity + w score) dt + sqrt(2 w) dW, of t's shape.

        Args:
            t: Times of any shape.
            form: "constant", "sbdm" (that of score-based diffusion models), "sigma", "linear" (1 - t), "decreasing"
                ((1 + norm cos pi t)^2 / 4) or "increasing-decreasing" (sin^2 pi t).
            norm: Factor of w; in "decreasing" of the cosine, as the authors have it.

        Raises:
            ValueError: An unknown form.
        """
        check_name("diffusion form", form, get_args(DiffusionForm))
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
