"""Floor 0: diffusion and flow, their losses, paths and samplers. Knows no network.

A *denoiser* is any function of x (B, C, H, W) and t (B,); what else the network takes is bound by the caller.
Diffusion counts its time from images (t = 0) to noise (t = 999), flow from noise (t = 0) to images (t = 1), as
the authors of DiT and SiT do.
"""

from lineardiff.generation.diffusion import Denoised, GaussianDiffusion, Posterior, Variance
from lineardiff.generation.diffusion_samplers import invert_ddim, sample_ancestral, sample_ddim
from lineardiff.generation.flow import DiffusionForm, Interpolant, Prediction, Weighting
from lineardiff.generation.flow_samplers import LastStep, SdeMethod, sample_ode, sample_sde
from lineardiff.generation.guidance import guided
from lineardiff.generation.likelihood import log_likelihood
from lineardiff.generation.noise import Callback, Denoiser, Noise
from lineardiff.generation.ode import OdeMethod, solve_ode
from lineardiff.generation.paths import Path, PathName
