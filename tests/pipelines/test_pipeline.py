"""The pipeline against closed forms, and against the samplers called by hand."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

diffusers = pytest.importorskip("diffusers")

from diffusers import (  # noqa: E402
    AutoencoderKL,
    DDIMInverseScheduler,
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
)
from exact_network import STD, ExactNetwork, truth  # noqa: E402

from lineardiff.generation import GaussianDiffusion, Interpolant, sample_sde  # noqa: E402
from lineardiff.models.dit import DiT  # noqa: E402
from lineardiff.pipelines.pipeline import METHODS, LinearDiffPipeline  # noqa: E402
from lineardiff.pipelines.schedulers import sample_diffusion  # noqa: E402

TRAINED = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": "linear"}
STOCHASTIC = ("ddpm", "sde-euler", "sde-heun")


def exact(objective: str = "flow", *, scheduler: Any = None, **config: Any) -> LinearDiffPipeline:
    network = ExactNetwork(flow=objective == "flow", **config).eval()
    return quiet(LinearDiffPipeline(network, scheduler=scheduler, objective=objective))


def quiet(pipeline: LinearDiffPipeline) -> LinearDiffPipeline:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def dit(**config: Any) -> DiT:
    """Return a network whose output is not zero and depends on the class."""
    torch.manual_seed(0)
    sizes = {"sample_size": 8, "patch_size": 4, "in_channels": 1, "dim": 16, "depth": 1, "num_heads": 2}
    model = DiT(**{**sizes, "num_classes": 3, "learn_sigma": False, **config})
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tiny_vae(latent_channels: int = 4, **config: Any) -> AutoencoderKL:
    torch.manual_seed(1)
    return AutoencoderKL(
        **config,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=latent_channels,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def start(B: int, channels: int = 1) -> Tensor:
    return torch.randn(B, channels, 8, 8, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "method", [m for methods in METHODS.values() for m in methods if m not in (*STOCHASTIC, "ddim-inverse")]
)
def test_deterministic_methods_follow_the_exact_flow_of_each_class(method: str) -> None:
    pipeline = exact("diffusion" if method == "ddim" else "flow")
    steps = {"ode-euler": 400, "ode-midpoint": 60, "ode-heun": 60, "ode-dopri5": None, "ddim": 400}[method]
    for scale in (1.0, 2.0):
        images = pipeline(
            [1, 0, 1],
            latents=start(3) / 4,  # so that nothing is clipped
            method=method,
            num_inference_steps=steps,
            guidance_scale=scale,
            output_type="latent",
        ).images
        torch.testing.assert_close(images, truth(start(3) / 4, [1, 0, 1], scale=scale), rtol=0, atol=0.03)


@pytest.mark.parametrize("method", STOCHASTIC)
def test_stochastic_methods_have_the_mean_and_spread_of_each_class(method: str) -> None:
    pipeline = exact("diffusion" if method == "ddpm" else "flow", sample_size=64)
    steps = 250 if method == "ddpm" else 60
    images = pipeline(
        [0, 1], method=method, num_inference_steps=steps, generator=generators(0, 1), output_type="latent"
    ).images
    error = images - truth(torch.zeros(2, 1, 64, 64), [0, 1])
    assert error.mean((1, 2, 3)).abs().max() < 0.015  # 4 standard errors
    assert error.std((1, 2, 3)) == pytest.approx(torch.full((2,), STD), rel=0.08)


@pytest.mark.parametrize(
    ("scheduler", "steps", "tolerance"),
    [
        (FlowMatchEulerDiscreteScheduler(), 300, 0.01),
        (FlowMatchEulerDiscreteScheduler(shift=3.0), 300, 0.02),
        (FlowMatchHeunDiscreteScheduler(), 60, 0.01),
        (DDIMScheduler(**TRAINED, clip_sample=False, timestep_spacing="trailing"), 250, 0.02),
        (DPMSolverMultistepScheduler(**TRAINED), 100, 0.02),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "config") else None,
)
def test_schedulers_of_diffusers_follow_the_exact_flow(scheduler: Any, steps: int, tolerance: float) -> None:
    pipeline = exact("flow" if "Flow" in type(scheduler).__name__ else "diffusion", scheduler=scheduler)
    images = pipeline(
        [1, 0], latents=start(2), num_inference_steps=steps, guidance_scale=2.0, output_type="latent"
    ).images
    torch.testing.assert_close(images, truth(start(2), [1, 0], scale=2.0), rtol=0, atol=tolerance)


def test_guidance_is_of_the_first_channels_and_within_the_interval() -> None:
    pipeline = exact(in_channels=4)
    options = {"latents": start(1, 4) / 4, "num_inference_steps": 50, "output_type": "latent"}
    plain, whole = truth(options["latents"], [0]), truth(options["latents"], [0], scale=3.0)
    images = pipeline([0], guidance_scale=3.0, guidance_channels=3, **options).images
    torch.testing.assert_close(images, torch.cat([whole[:, :3], plain[:, 3:]], 1), rtol=0, atol=0.01)
    never = pipeline([0], guidance_scale=3.0, guidance_interval=(2.0, 3.0), **options).images
    torch.testing.assert_close(never, plain, rtol=0, atol=0.01)


def test_inversion_leads_to_noise_that_leads_back() -> None:
    pipeline, x = exact("diffusion"), truth(start(2) / 4, [0, 1])
    options = {"num_inference_steps": 400, "output_type": "latent"}
    noise = pipeline([0, 1], latents=x, method="ddim-inverse", **options).images
    torch.testing.assert_close(noise, start(2) / 4, rtol=0, atol=0.03)
    again = pipeline([0, 1], latents=noise, method="ddim", **options).images
    torch.testing.assert_close(again, x, rtol=0, atol=0.01)
    with pytest.raises(ValueError, match="turns latents into noise"):
        pipeline([0, 1], method="ddim-inverse", **options)


def by_hand(network: DiT, label: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, t: network(x, t, torch.tensor([label]), return_dict=False)[0]


def test_noise_comes_from_the_generator_of_each_image() -> None:
    flow, diffusion = dit(), dit(learn_sigma=True)
    g = generators(3)[0]
    first = torch.randn(1, 1, 8, 8, generator=g)
    sde = sample_sde(
        Interpolant(), by_hand(flow, 2), first, noise=g, diffusion_form="sigma", num_steps=5, method="heun"
    )
    images = LinearDiffPipeline(flow)(
        [0, 2], method="sde-heun", num_inference_steps=5, generator=generators(9, 3), output_type="latent"
    ).images
    torch.testing.assert_close(images[1:], sde)
    g = generators(3)[0]
    first = torch.randn(1, 1, 8, 8, generator=g)
    ddpm = sample_diffusion(
        GaussianDiffusion(), by_hand(diffusion, 2), first, num_steps=5, generator=g, clip_denoised=True
    )
    images = LinearDiffPipeline(diffusion, objective="diffusion")(
        [0, 2], num_inference_steps=5, generator=generators(9, 3), output_type="latent"
    ).images
    torch.testing.assert_close(images[1:], ddpm)


@pytest.mark.parametrize(
    "scheduler", [None, DDPMScheduler(**TRAINED, clip_sample=False, variance_type="fixed_small")]
)
@pytest.mark.parametrize("objective", ["flow", "diffusion"])
def test_an_image_is_independent_of_its_batch(objective: str, scheduler: Any) -> None:
    if objective == "flow" and scheduler is not None:
        scheduler = FlowMatchEulerDiscreteScheduler()
    pipeline = quiet(LinearDiffPipeline(dit(), scheduler=scheduler, objective=objective))
    method = None if scheduler else {"flow": "sde-euler", "diffusion": "ddpm"}[objective]
    options = {"method": method, "num_inference_steps": 4, "guidance_scale": 2.0, "output_type": "latent"}
    three = pipeline([0, 1, 2], generator=generators(0, 1, 2), **options).images
    one = pipeline([1], generator=generators(1), **options).images
    torch.testing.assert_close(three[1:2], one, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(three[0], three[1], atol=0.1)


def test_a_learned_variance_is_used_by_ddpm_and_dropped_by_others() -> None:
    network = dit(learn_sigma=True, in_channels=4)
    pipeline = quiet(LinearDiffPipeline(network, objective="diffusion"))
    options = {"num_inference_steps": 20, "guidance_scale": 1.5, "output_type": "latent"}
    own = pipeline([0, 1], generator=generators(0, 1), **options).images
    # the same steps as ours
    spacing = {"clip_sample": False, "timestep_spacing": "linspace"}
    pipeline.scheduler = DDPMScheduler(**TRAINED, **spacing, variance_type="learned_range")
    theirs = pipeline([0, 1], generator=generators(0, 1), **options).images
    torch.testing.assert_close(theirs, own, rtol=1e-3, atol=1e-3)
    # a method that is named goes before the scheduler
    named = pipeline([0, 1], generator=generators(0, 1), method="ddpm", **options).images
    torch.testing.assert_close(named, own)
    for scheduler in (DDIMScheduler(**TRAINED, **spacing), DPMSolverMultistepScheduler(**TRAINED)):
        pipeline.scheduler = scheduler
        images = pipeline([0, 1], generator=generators(0, 1), **options).images
        assert images.shape == (2, 4, 8, 8)
        assert images.isfinite().all()
        assert not torch.allclose(images, own, atol=0.1)


def test_save_and_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["boot", "bag", "coat"]
    pipeline = LinearDiffPipeline(dit(), prediction="noise", path="gvp", class_names=names)
    pipeline.save_pretrained(tmp_path / "plain")
    config = json.loads((tmp_path / "plain/model_index.json").read_text())
    assert config["transformer"] == ["lineardiff.models.dit", "DiT"]
    assert (config["path"], config["prediction"], config["class_names"]) == ("gvp", "noise", names)
    logging.getLogger("diffusers").propagate = True
    loaded = quiet(LinearDiffPipeline.from_pretrained(tmp_path / "plain"))
    logging.getLogger("diffusers").propagate = False
    assert "Expected types" not in caplog.text
    assert (loaded.vae, loaded.scheduler, loaded.class_names) == (None, None, names)
    options = {"latents": start(2), "num_inference_steps": 4, "output_type": "latent"}
    assert torch.equal(quiet(pipeline)(["coat", 0], **options).images, loaded([2, "boot"], **options).images)

    whole = LinearDiffPipeline(
        dit(in_channels=4), vae=tiny_vae(), scheduler=FlowMatchEulerDiscreteScheduler(shift=2.0)
    )
    whole.save_pretrained(tmp_path / "whole")
    loaded = quiet(LinearDiffPipeline.from_pretrained(tmp_path / "whole"))
    assert loaded.scheduler.config.shift == 2.0
    options = {"latents": start(2, 4), "num_inference_steps": 4, "output_type": "np"}
    assert np.array_equal(quiet(whole)([1, 0], **options).images, loaded([1, 0], **options).images)
    without = LinearDiffPipeline.from_pretrained(tmp_path / "whole", vae=None, scheduler=None)
    assert (without.vae, without.scheduler) == (None, None)
    for config, word in (
        ({"scaling_factor": 0.36}, "scaling_factor"),
        ({"shift_factor": 0.1}, "shift_factor"),
    ):
        with pytest.raises(ValueError, match=f"does not fit the network's latents: {word} is"):
            LinearDiffPipeline.from_pretrained(tmp_path / "whole", vae=tiny_vae(**config))
    without.vae = tiny_vae(scaling_factor=0.36)
    with pytest.raises(ValueError, match=r"scaling_factor is 0.36, not 0.18215"):
        quiet(without)([1], num_inference_steps=1)


def test_a_repository_of_the_hub_is_fetched_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LinearDiffPipeline(dit(), class_names=["a", "b", "c"]).save_pretrained(tmp_path)
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("lineardiff.pipelines.pipeline.snapshot_download", download)
    pipeline = LinearDiffPipeline.from_pretrained("someone/garments", revision="v2")
    assert pipeline.class_names == ["a", "b", "c"]
    ((name, options),) = asked
    assert (name, options["revision"]) == ("someone/garments", "v2")


def test_outputs_in_pixels_and_through_a_vae() -> None:
    pipeline = exact()
    run = {"latents": start(2), "num_inference_steps": 60}
    images = truth(start(2), [0, 1])
    torch.testing.assert_close(
        pipeline([0, 1], output_type="pt", **run).images, (images / 2 + 0.5).clamp(0, 1), rtol=0, atol=0.01
    )
    array = pipeline([0, 1], output_type="np", **run).images
    assert array.shape == (2, 8, 8, 1)
    pictures = pipeline([0, 1], **run).images
    assert [(p.mode, p.size) for p in pictures] == [("L", (8, 8))] * 2
    assert np.array_equal(np.asarray(pictures[1]), (array[1, ..., 0] * 255).round().astype(np.uint8))
    (tensors,) = pipeline([0, 1], output_type="pt", return_dict=False, **run)
    assert tensors.shape == (2, 1, 8, 8)

    vae = tiny_vae(scaling_factor=0.36, shift_factor=0.12)
    pipeline = quiet(LinearDiffPipeline(ExactNetwork(in_channels=4).eval(), vae=vae))
    run["latents"] = start(2, 4)
    with torch.no_grad():
        decoded = vae.decode(truth(start(2, 4), [0, 1]) / 0.36 + 0.12).sample
    images = pipeline([0, 1], output_type="pt", **run).images
    torch.testing.assert_close(images, (decoded / 2 + 0.5).clamp(0, 1), rtol=0, atol=0.02)
    assert [p.size for p in pipeline([0, 1], **run).images] == [(16, 16)] * 2


def test_callbacks_and_the_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, float]] = []

    def note(pipeline: Any, step: int, time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append((step, round(float(time), 3)))
        return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    pipeline = LinearDiffPipeline(ExactNetwork().eval())
    options = {"num_inference_steps": 4, "callback_on_step_end": note, "output_type": "latent"}
    pipeline([0], method="ode-euler", **options)
    assert seen == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    assert "4/4" in capsys.readouterr().err
    seen.clear()
    pipeline([0], method="ode-dopri5", callback_on_step_end=note)
    assert "100/100" in capsys.readouterr().err
    assert seen[-1][0] == 99
    seen.clear()
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler()
    assert not pipeline([0], **options).images.any()  # the callback's zeros
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert seen[0][1] == 1000
    assert "4/4" in capsys.readouterr().err
    with pytest.raises(ValueError, match="flow methods do not take"):
        pipeline([0], **{**options, "callback_on_step_end": lambda *a: {"latents": 0}}, method="ode-euler")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"class_labels": [3]}, "unknown class 3; expected 0 to 2"),
        ({"class_labels": [-1]}, "unknown class -1"),
        ({"class_labels": ["bot"]}, "unknown class 'bot'.*'boot', 'bag', 'coat'"),
        ({"class_labels": "bag"}, "class_labels='bag'; expected a list"),
        ({"class_labels": 3}, "class_labels=3; expected a list"),
        ({"class_labels": None}, "class_labels=None; expected a list"),
        ({"class_labels": torch.tensor(1)}, "class_labels=1; expected a list"),
        ({"class_labels": np.array(1)}, "class_labels=1; expected a list"),
        ({"class_labels": torch.tensor([[1]])}, r"unknown class \[1\]"),
        ({"class_labels": {0: 1}}, "class_labels={0: 1}; expected a list"),
        ({"guidance_interval": 0.5}, "interval=0.5; expected"),
        ({"guidance_interval": (0.1, float("nan"))}, "interval="),
        ({"guidance_interval": ("a", "b")}, "interval="),
        ({"guidance_interval": (0.1, 0.2, 0.3)}, "interval="),
        ({"guidance_scale": "4"}, "scale='4'; expected"),
        ({"guidance_scale": True}, "scale=True; expected"),
        ({"guidance_scale": float("inf")}, "scale=inf; expected"),
        ({"guidance_channels": 0.5}, "channels=0.5"),
        ({"guidance_channels": True}, "channels=True"),
        ({"generator": 3}, "generator=3; expected a torch.Generator"),
        ({"generator": [3, 4]}, "generator=.*expected a torch.Generator"),
        ({"eta": float("nan")}, "eta=nan"),
        ({"eta": 0.5}, "eta=0.5"),
        ({"num_inference_steps": True}, "num_inference_steps=True"),
        ({"num_inference_steps": float("nan")}, "num_inference_steps=nan"),
        ({"num_inference_steps": -3}, "num_inference_steps=-3"),
        ({"latents": 3}, "latents=3; expected a tensor"),
        ({"latents": torch.full((2, 1, 8, 8), torch.nan)}, "latents contain NaN"),
        ({"callback_on_step_end": 3}, "callback_on_step_end=3"),
        ({"method": 3}, "unknown method of flow 3"),
        ({"class_labels": [1.7]}, "unknown class 1.7"),
        ({"class_labels": [True]}, "unknown class True"),
        ({"class_labels": [None]}, "unknown class None"),
        ({"num_inference_steps": 2.5}, "num_inference_steps=2.5 must be an integer"),
        ({"guidance_scale": float("nan")}, "scale=nan; expected a"),
        ({"class_labels": []}, "one label per image"),
        ({"method": "ddim"}, "unknown method of flow 'ddim'; choose from 'ode-heun'"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"method": "ode-dopri5", "num_inference_steps": 3}, "dopri5 is adaptive"),
        ({"output_type": "jpg"}, "unknown output_type 'jpg'"),
        ({"latents": torch.zeros(1, 4, 8, 8)}, r"shape \(1, 4, 8, 8\); expected \(2, 1, 8, 8\)"),
        ({"generator": [torch.Generator()]}, "1 generators for 2 images"),
        ({"guidance_scale": 2.0, "guidance_channels": 3}, "channels=3, but x has 1"),
    ],
)
def test_a_call_refuses(call: dict[str, Any], message: str) -> None:
    pipeline = quiet(LinearDiffPipeline(dit(), class_names=["boot", "bag", "coat"]))
    with pytest.raises(ValueError, match=message):
        pipeline(**{"class_labels": ["bag", 1], "num_inference_steps": None, **call})


def test_a_call_refuses_what_the_network_cannot() -> None:
    with pytest.raises(ValueError, match="no null label"):
        LinearDiffPipeline(dit(class_dropout_prob=0.0))([0], guidance_scale=2.0)
    with pytest.raises(ValueError, match="training mode"):
        LinearDiffPipeline(dit().train())([0])
    with pytest.raises(ValueError, match="need a VAE"):
        LinearDiffPipeline(dit(in_channels=4))([0])
    broken = dit()
    nn.init.constant_(broken.final_layer.linear.bias, torch.nan)
    with pytest.raises(ValueError, match="not finite"):
        quiet(LinearDiffPipeline(broken))([0], num_inference_steps=2)
    with pytest.raises(ValueError, match="network has probably diverged"):
        quiet(LinearDiffPipeline(broken))([0], method="ode-dopri5")
    for scheduler in (DDIMScheduler(**TRAINED), DDPMScheduler(**TRAINED)):
        pipeline = quiet(LinearDiffPipeline(dit(), scheduler=scheduler, objective="diffusion"))
        with pytest.raises(ValueError, match="num_inference_steps=0"):
            pipeline([0], num_inference_steps=0)
    with pytest.raises(ValueError, match="no class names"):
        LinearDiffPipeline(dit())(["bag"])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"objective": "gan"}, "unknown objective 'gan'"),
        ({"prediction": "data"}, "unknown prediction 'data'"),
        ({"class_names": ["a", "b"]}, "2 class_names; expected 3"),
        ({"class_names": ["a", "b", "a"]}, "different ones"),
        ({"class_names": "abc"}, "class_names='abc'; expected a list of strings"),
        ({"class_names": [None, 1, 2]}, "expected a list of strings"),
        ({"latent_space": {"channels": 4}}, "does not describe its latent space"),
        ({"latent_space": 3}, "does not describe its latent space"),
        (
            {"transformer": dit(in_channels=4), "vae": tiny_vae(scaling_factor=float("nan"))},
            "scaling_factor=nan",
        ),
        ({"transformer": dit(in_channels=4), "vae": tiny_vae(latents_mean=[0.1] * 4)}, "latents_mean"),
        ({"vae": tiny_vae(2)}, "latents have 2 channels, but the transformer takes 1"),
        ({"scheduler": DDIMScheduler(**TRAINED)}, "DDIMScheduler does not sample flow"),
        (
            {"scheduler": FlowMatchEulerDiscreteScheduler(), "objective": "diffusion"},
            "not sample diffusion models",
        ),
        ({"scheduler": FlowMatchEulerDiscreteScheduler(), "path": "gvp"}, "needs path 'linear'"),
        ({"scheduler": FlowMatchEulerDiscreteScheduler(invert_sigmas=True)}, "invert_sigmas"),
        ({"scheduler": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)}, "use_dynamic_shifting"),
        (
            {"scheduler": DDIMInverseScheduler(**TRAINED), "objective": "diffusion"},
            "does not sample diffusion",
        ),
        (
            {
                "scheduler": DPMSolverMultistepScheduler(**TRAINED, use_flow_sigmas=True),
                "objective": "diffusion",
            },
            "use_flow_sigmas=True, which changes the process",
        ),
        (
            {
                "transformer": dit(in_channels=4),
                "scheduler": DDIMScheduler(**TRAINED, clip_sample=False, thresholding=True),
                "objective": "diffusion",
            },
            "thresholding=True",
        ),
        ({"scheduler": DDIMScheduler(beta_end=0.012), "objective": "diffusion"}, "another noise schedule"),
        (
            {"scheduler": DDIMScheduler(**TRAINED, prediction_type="v_prediction"), "objective": "diffusion"},
            "predicts 'epsilon'",
        ),
        (
            {
                "scheduler": DDPMScheduler(**TRAINED, variance_type="learned_range"),
                "objective": "diffusion",
            },
            "a model with a learned variance",
        ),
        (
            {
                "transformer": dit(in_channels=4),
                "scheduler": DDPMScheduler(**TRAINED),
                "objective": "diffusion",
            },
            "clip_sample=True",
        ),
    ],
)
def test_parts_that_do_not_fit(parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinearDiffPipeline(**{"transformer": dit(), **parts})
