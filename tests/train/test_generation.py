"""The generation task: what it shows the network, what it minimises, what it leaves in the run folder."""

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("diffusers")

import safetensors.torch
import torch
from accelerate.utils import set_seed
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_generation import TINY_SIT
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from toy import rows

from lineardiff.data import open_images, subset
from lineardiff.data.latents import open_latents, write_index, write_latents
from lineardiff.pipelines.autoencoder import LatentSpace, encode_moments, fingerprint_of
from lineardiff.pipelines.pipeline import AutoencoderKL, LinearDiffPipeline
from lineardiff.recipes import GenerationRecipe, fashion_sit
from lineardiff.train import GenerationTask, train
from lineardiff.train.generation import pixel_transform

DIFFUSION = replace(TINY_SIT, name="tiny_dit", objective="diffusion", model="vca_dit_s_4")


class Recorder(nn.Module):
    """Returns zeros with the given number of channels, and keeps its inputs."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.zeros(1))
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor, t: Tensor, labels: Tensor, return_dict: bool = True) -> tuple[Tensor]:
        assert not return_dict
        self.calls.append((x, t, labels))
        return (x.new_zeros(len(x), self.channels, *x.shape[2:]) + 0 * self.weight,)


def test_the_loss_of_a_flow_is_that_of_its_velocity() -> None:
    """On the linear path x_t = t x + (1 - t) noise, whose velocity x - noise is (x - x_t) / (1 - t)."""
    task, model = GenerationTask(TINY_SIT), Recorder(1)
    x, labels = torch.rand(8, 1, 28, 28) * 2 - 1, torch.arange(8)
    loss = task.loss(model, (x, labels))
    ((x_t, t, given),) = model.calls
    assert torch.equal(given, labels)
    assert t.unique().numel() == 8
    velocity = (x - x_t) / (1 - t.view(-1, 1, 1, 1))
    assert loss.item() == pytest.approx(velocity.square().mean().item(), rel=1e-3)


def test_the_loss_of_a_diffusion_counts_noise_and_variance() -> None:
    task, model = GenerationTask(DIFFUSION), Recorder(2)
    x = torch.rand(8, 1, 28, 28) * 2 - 1
    loss = task.loss(model, (x, torch.arange(8)))
    ((x_t, t, _),) = model.calls
    level = (1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)).cumprod(0)[t].view(-1, 1, 1, 1)
    noise = (x_t - level.sqrt() * x) / (1 - level).sqrt()
    assert noise.std().item() == pytest.approx(1, abs=0.05)
    mse = noise.square().mean().item()
    assert mse < loss.item()  # the variational bound comes on top
    assert task.validate(model).keys() == {"loss", "mse", "vb"}


def test_random_numbers_are_those_of_the_loop() -> None:
    """The loop seeds the global generators before each update; parts of one update differ."""
    task = GenerationTask(TINY_SIT)
    batch = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.long)
    seen = []
    for seed in (3, 3, 4):
        set_seed(seed)
        model = Recorder(1)
        for _ in range(2):
            task.loss(model, batch)
        seen.append(torch.stack([x for x, _, _ in model.calls]))
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0][0], seen[0][1])


def test_pixels_are_exact_and_only_mirrored() -> None:
    task = GenerationTask(TINY_SIT)
    grey = [
        torch.from_numpy(np.array(image.convert("L"))).float() / 127.5 - 1
        for image, _ in (task.train_data.split[i] for i in range(20))
    ]
    mirrored = 0
    for index, truth in enumerate(grey):
        for seed in range(5):
            x, label = task.train_data[index, seed]
            assert x.shape == (1, 28, 28)
            assert label == task.train_data.split[index][1]
            flipped = not torch.allclose(x[0], truth, atol=1e-6)
            mirrored += flipped
            torch.testing.assert_close(x[0], truth.flip(1) if flipped else truth)
    assert 30 < mirrored < 70  # of 100
    upright = torch.stack([x for x, _ in task.validation])  # type: ignore[attr-defined]
    assert upright.shape == (24, 1, 28, 28)
    large = pixel_transform(image_size=8, hflip=1.0)(Image.new("RGB", (30, 20), (255, 0, 0)))
    torch.testing.assert_close(large, torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1).expand(3, 8, 8))


def test_validation_is_the_same_at_every_call_and_for_every_batch_size() -> None:
    losses = []
    for recipe in (TINY_SIT, replace(TINY_SIT, batch_size=6)):
        task = GenerationTask(recipe)
        for _ in range(2):
            torch.rand(3)
            losses.append(task.validate(Recorder(1))["loss"])
    assert losses[0] == losses[1]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    assert GenerationTask(replace(TINY_SIT, seed=1)).validate(Recorder(1))["loss"] != losses[0]


def test_a_run_leaves_curves_samples_and_a_pipeline(tmp_path: Path) -> None:
    task = GenerationTask(TINY_SIT)
    summary = train(task, output=tmp_path)
    assert [row["step"] for row in rows(tmp_path / "validation.csv")] == [6, 12]
    assert summary["ema_loss"] == rows(tmp_path / "validation.csv")[-1]["ema_loss"]
    names = ["step-00000006.png", "step-00000012.png"]
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == names
    with Image.open(tmp_path / "samples" / names[1]) as picture:
        assert picture.size == (4 * 30 + 2, 30 + 2)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Images("samples")] == [6, 12]

    pipeline = LinearDiffPipeline.from_pretrained(str(tmp_path / "pipeline"))
    assert pipeline.class_names == list(task.classes)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    loaded = pipeline.transformer.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in weights)
    assert not torch.equal(
        weights["final_layer.linear.weight"], task.model.final_layer.linear.weight
    )  # but the average
    # The last grid again, from the pipeline that was saved.
    again = task.picture(pipeline.transformer.eval())
    assert again is not None
    with Image.open(tmp_path / "samples" / names[1]) as picture:
        np.testing.assert_array_equal(np.asarray(picture), again.permute(1, 2, 0).numpy())


def test_the_average_starts_as_a_copy(tmp_path: Path) -> None:
    """torch's AveragedModel, shown the initial weights, and then the weights after each update."""
    recipe = replace(TINY_SIT, epochs=None, steps=3, accumulate=1, ema_decay=0.7, grid_images=0)
    task = GenerationTask(recipe)
    truth = AveragedModel(task.model, multi_avg_fn=get_ema_multi_avg_fn(0.7))
    loss = task.loss

    def watched(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        truth.update_parameters(task.model)  # before update 1: the initial weights, copied
        return loss(model, batch)

    task.loss = watched  # type: ignore[method-assign]
    train(task, output=tmp_path)
    truth.update_parameters(task.model)
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, expected in truth.module.state_dict().items():
        torch.testing.assert_close(saved[name], expected, rtol=1e-5, atol=1e-7)
    assert not (tmp_path / "samples").exists()


def test_the_learning_rate_is_constant_and_the_length_in_updates(tmp_path: Path) -> None:
    recipe = replace(
        TINY_SIT, epochs=None, steps=8, learning_rate=1e-4, min_learning_rate=None, log_every=2, grid_images=0
    )
    train(GenerationTask(recipe), output=tmp_path)
    table = rows(tmp_path / "train.csv")
    assert [row["step"] for row in table] == [2, 4, 6, 8]
    assert {row["learning_rate"] for row in table} == {1e-4}
    assert [row["step"] for row in rows(tmp_path / "validation.csv")] == [6, 8]


@pytest.fixture
def vae(tmp_path: Path) -> str:
    """A random autoencoder with the strides of Stable Diffusion's."""
    torch.manual_seed(0)
    kinds = ("DownEncoderBlock2D",) * 4, ("UpDecoderBlock2D",) * 4
    model = AutoencoderKL(
        block_out_channels=(4, 4, 4, 4),
        down_block_types=kinds[0],
        up_block_types=kinds[1],
        norm_num_groups=2,
        layers_per_block=1,
        scaling_factor=0.36,
        shift_factor=0.12,
    )
    model.save_pretrained(tmp_path / "vae")
    return str(tmp_path / "vae")


def test_latents_are_drawn_from_their_moments_and_decoded(tmp_path: Path, vae: str) -> None:
    split = subset(open_images("fashion", "train"), limit=32)
    folder = tmp_path / "latents"
    folder.mkdir()
    encoder = AutoencoderKL.from_pretrained(vae)
    transform = pixel_transform(image_size=32, hflip=0.0)
    write_latents(
        split,
        folder,
        [0],
        encode=lambda x: encode_moments(encoder, ((x + 1) * 127.5).round().byte()),
        transform=transform,
    )
    settings = {
        "vae": vae,
        "fingerprint_of_vae": fingerprint_of(encoder),
        "latent_space": asdict(LatentSpace.of(encoder)),
    }
    write_index(split, folder, shards=1, settings=settings)
    recipe = GenerationRecipe(
        data=str(folder),
        vae=vae,
        image_size=32,
        precision="bf16",
        model="vca_sit_s_2",
        model_args=("dim=16", "depth=1", "num_heads=2"),
        steps=2,
        batch_size=16,
        workers=0,
        validation_limit=8,
        grid_images=3,
        grid_steps=2,
    )
    task = GenerationTask(recipe)
    model = Recorder(4)
    moments, labels = task.collate([task.train_data[i, i] for i in range(32)])
    task.loss(model, (moments, labels))
    x_t, t, _ = model.calls[0]
    assert x_t.shape == (32, 4, 4, 4)
    # x_t - t E[x] is noise of the moments and of the path.
    mean, log_variance = moments.chunk(2, dim=1)
    t = t.view(-1, 1, 1, 1)
    variance = (t * 0.36) ** 2 * log_variance.exp() + (1 - t) ** 2
    normal = (x_t - t * 0.36 * (mean - 0.12)) / variance.sqrt()
    assert normal.mean().item() == pytest.approx(0, abs=4 / 2048**0.5)
    assert normal.var().item() == pytest.approx(1, abs=4 * (2 / 2048) ** 0.5)

    assert len(task.validation) == 8
    latents = open_latents(folder)
    first = int(np.sort(np.random.default_rng(0).permutation(32)[:8])[0])
    assert task.validation[0][1] == int(latents.labels[first])
    train(task, output=tmp_path / "run")
    with Image.open(tmp_path / "run/samples/step-00000002.png") as picture:
        assert picture.size == (3 * 34 + 2, 34 + 2)
    pipeline = LinearDiffPipeline.from_pretrained(str(tmp_path / "run/pipeline"))
    assert pipeline.vae is not None
    assert pipeline([3], num_inference_steps=2).images[0].size == (32, 32)

    with pytest.raises(ValueError, match=r"image_size=64: .*moments of \(8, 4, 4\).*divides sides by 8"):
        GenerationTask(replace(recipe, image_size=64))
    with pytest.raises(ValueError, match=r"the autoencoder nowhere does not exist"):
        GenerationTask(replace(recipe, vae="nowhere"))
    encoder.register_to_config(scaling_factor=0.18215)
    encoder.save_pretrained(tmp_path / "rescaled")
    with pytest.raises(ValueError, match=r"rescaled does not fit .*scaling_factor is 0.18215, not 0.36"):
        GenerationTask(replace(recipe, vae=str(tmp_path / "rescaled")))
    torch.nn.init.normal_(encoder.decoder.conv_out.weight)
    encoder.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"vae=.*its weights are not those that wrote the latents"):
        GenerationTask(replace(recipe, vae=str(tmp_path / "other")))
    assert GenerationTask(replace(recipe, vae=None)).picture(task.model) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "vca_sit_m_4"}, r"'vca_sit_m_4'; did you mean vca_sit_"),
        ({"model_args": ("embed_dim=16",)}, r"model_args=\('embed_dim=16',\): .*embed_dim"),
        ({"model": "vca_dit_s_4"}, r"model='vca_dit_s_4': it predicts a variance"),
        ({"model_args": ("class_dropout_prob=0",)}, r"grid_guidance=2.0: class_dropout_prob=0 "),
        ({"image_size": 30}, r"sample_size=30 must be .*patch_size=4"),
        ({"data": "nowhere"}, r"nowhere"),
    ],
)
def test_what_does_not_exist_or_fit_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationTask(replace(fashion_sit(), **changes))


def test_the_seed_decides_the_weights_and_leaves_the_generators() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    a, b, c = (GenerationTask(replace(TINY_SIT, seed=seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [task.model.blocks[0].mlp.fc1.weight for task in (a, b, c)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_checkpointing_recomputes_the_same_gradients(tmp_path: Path) -> None:
    for on in (False, True):
        recipe = replace(TINY_SIT, epochs=1, grad_checkpointing=on, grid_images=0)
        task = GenerationTask(recipe)
        train(task, output=tmp_path / str(on))
        assert task.model.gradient_checkpointing is on
    on, off = (
        safetensors.torch.load_file(tmp_path / name / "model.safetensors") for name in ("True", "False")
    )
    for name in off:
        torch.testing.assert_close(on[name], off[name], rtol=1e-4, atol=1e-6)
