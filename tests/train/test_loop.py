"""The loop: schedule, accumulation, averaging, clipping, precision, and what a run leaves on the disk."""

import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from toy import TINY, TOY, ToyTask, flat, rows

from lineardiff.data import EpochBatches
from lineardiff.recipes import TrainingRecipe
from lineardiff.runs.run import RunWriter
from lineardiff.train import ClassificationTask, train
from lineardiff.train.loop import _Loop
from lineardiff.train.setup import build_optimizer, enable_grad_checkpointing


def learning_rate(done: int) -> float:
    """Of TOY's update after `done` others: 5 updates of warm-up, a cosine over all 15."""
    if done < 5:
        return 0.001 + (0.1 - 0.001) * done / 5
    return 0.01 + 0.5 * (0.1 - 0.01) * (1 + math.cos(math.pi * done / 15))


def test_learning_rate_is_warm_up_then_cosine(tmp_path: Path) -> None:
    train(ToyTask(), output=tmp_path)
    table = rows(tmp_path / "train.csv")
    assert [row["step"] for row in table] == list(range(1, 16))
    assert [row["epoch"] for row in table] == [step / 5 for step in range(1, 16)]
    expected = [learning_rate(done) for done in range(15)]
    assert [row["learning_rate"] for row in table] == pytest.approx(expected, rel=1e-12)


def test_every_update_is_the_one_computed_by_hand(tmp_path: Path) -> None:
    """Nesterov SGD (timm's "sgd") on linear regression with its gradient written out, in float64."""
    task = ToyTask(replace(TOY, log_every=2))
    train(task, output=tmp_path)
    weights, momentum = np.full(6, 0.1), np.zeros(6)
    losses, norms = [], []
    for done, keys in enumerate(EpochBatches(40, batch_size=8, total_steps=15, seed=0)):
        points, targets = zip(*(task.train_data[key] for key in keys), strict=True)
        x = np.hstack([torch.stack(points).double().numpy(), np.ones((8, 1))])
        error = x @ weights - torch.stack(targets).double().numpy()
        losses.append((error**2).mean())
        gradient = 2 * x.T @ error / 8
        norms.append(np.linalg.norm(gradient))
        momentum = 0.9 * momentum + gradient
        weights = weights - learning_rate(done) * (gradient + 0.9 * momentum)
    np.testing.assert_allclose(flat(task.model).numpy(), weights, rtol=1e-4)
    table = rows(tmp_path / "train.csv")
    assert [row["step"] for row in table] == [2, 4, 6, 8, 10, 12, 14, 15]
    means = [np.mean(losses[first : first + 2]) for first in range(0, 15, 2)]
    assert [row["loss"] for row in table] == pytest.approx(means, rel=1e-4)
    assert [row["grad_norm"] for row in table] == pytest.approx([*norms[1::2], norms[-1]], rel=1e-4)


@pytest.mark.parametrize("accumulate", [2, 4])
def test_accumulated_parts_equal_one_batch(tmp_path: Path, accumulate: int) -> None:
    whole = ToyTask(replace(TOY, clip_grad=0.5))
    parts = ToyTask(replace(TOY, clip_grad=0.5, accumulate=accumulate))
    train(whole, output=tmp_path / "whole")
    train(parts, output=tmp_path / "parts")
    assert len(parts.seen) == accumulate * len(whole.seen)
    torch.testing.assert_close(flat(parts.model), flat(whole.model), rtol=1e-5, atol=1e-6)
    for a, b in zip(rows(tmp_path / "whole/train.csv"), rows(tmp_path / "parts/train.csv"), strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_average_follows_its_formula(tmp_path: Path) -> None:
    task = ToyTask(replace(TOY, ema_decay=0.7))
    summary = train(task, output=tmp_path)
    expected = task.seen[0].double()
    for weights in [*task.seen[1:], flat(task.model)]:
        expected = 0.7 * expected + 0.3 * weights.double()
    saved = safetensors.torch.load_file(tmp_path / "model.safetensors")
    average = torch.cat([saved["weight"].flatten(), saved["bias"]])
    torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)
    assert not torch.equal(average, flat(task.model))
    assert summary["weights"] == "ema"
    assert summary["ema_distance"] == pytest.approx((average - 1).norm().item(), rel=1e-6)
    assert summary["distance"] == pytest.approx((flat(task.model) - 1).norm().item(), rel=1e-6)


def test_clipping_bounds_the_step(tmp_path: Path) -> None:
    task = ToyTask(replace(TOY, optimizer="momentum", clip_grad=0.01))  # timm's plain SGD with momentum
    train(task, output=tmp_path)
    table = rows(tmp_path / "train.csv")
    assert all(row["grad_norm"] > 0.01 for row in table)  # reported before clipping
    first = (task.seen[1] - task.seen[0]).norm().item()
    assert first == pytest.approx(0.001 * 0.01, rel=1e-3)


def test_layer_decay_and_no_weight_decay() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=32, depth=2, num_heads=2
    )
    groups = build_optimizer(replace(TINY, layer_decay=0.5, weight_decay=0.05), model).param_groups
    found = {id(p): (group["lr_scale"], group["weight_decay"]) for group in groups for p in group["params"]}
    named = {name: found[id(p)] for name, p in model.named_parameters()}
    # Depth 2: embeddings are layer 0, blocks layers 1 and 2, the head layer 3.
    assert named["patch_embed.proj.weight"] == (0.125, 0.05)
    assert named["pos_embed"] == (0.125, 0.0)  # the model's no_weight_decay()
    assert named["blocks.0.attn.qkv.weight"] == (0.25, 0.05)
    assert named["blocks.0.attn.qkv.bias"] == (0.25, 0.0)
    assert named["blocks.1.norm1.weight"] == (0.5, 0.0)
    assert named["head.weight"] == (1.0, 0.05)


def test_bf16_computes_in_bf16_and_learns_finite_weights(tmp_path: Path) -> None:
    task = ClassificationTask(replace(TINY, precision="bf16"))
    seen: set[torch.dtype] = set()
    task.model.blocks[0].mlp.fc1.register_forward_hook(lambda m, x, y: seen.add(y.dtype))
    summary = train(task, output=tmp_path)
    assert seen == {torch.bfloat16}
    assert summary["precision"] == "bf16"
    assert all(torch.isfinite(p).all() and p.dtype == torch.float32 for p in task.model.parameters())
    # Another precision in the same process.
    assert train(ClassificationTask(TINY), output=tmp_path / "no")["precision"] == "no"


def test_recomputing_activations_changes_nothing(tmp_path: Path) -> None:
    recipe = replace(TINY, drop_path=0.5, epochs=1, warmup_epochs=0)
    tasks = [ClassificationTask(replace(recipe, grad_checkpointing=on)) for on in (False, True)]
    train(tasks[0], output=tmp_path / "plain")
    train(tasks[1], output=tmp_path / "recomputed")
    assert tasks[1].model.grad_checkpointing
    torch.testing.assert_close(flat(tasks[1].model), flat(tasks[0].model), rtol=1e-5, atol=1e-6)


def test_compiled_model_learns_the_same(tmp_path: Path) -> None:
    plain, compiled = ToyTask(), ToyTask(replace(TOY, compile=True))
    train(plain, output=tmp_path / "plain")
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(compiled, output=tmp_path / "compiled")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    torch.testing.assert_close(flat(compiled.model), flat(plain.model), rtol=1e-5, atol=1e-6)


class Diverging(ToyTask):
    """Its loss is not a number in the seventh update."""

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        return loss * math.nan if len(self.seen) == 7 else loss


@pytest.mark.parametrize("log_every", [1, 1000])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, log_every: int) -> None:
    with pytest.raises(FloatingPointError, match=r"step 7: the loss is nan.*learning_rate"):
        train(Diverging(replace(TOY, log_every=log_every)), output=tmp_path)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_run_folder_holds_a_model_that_timm_builds(tmp_path: Path) -> None:
    task = ClassificationTask(TINY)
    summary = train(task, output=tmp_path)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 12
    assert summary["parameters"] == sum(p.numel() for p in task.model.parameters())
    assert summary["images_per_second"] > 0
    assert summary["top1"] == rows(tmp_path / "validation.csv")[-1]["top1"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["weights"], config["image_size"], len(config["classes"])) == ("model", 16, 10)
    again = [
        timm.create_model(
            config["architecture"],
            **config["model_args"],
            checkpoint_path=str(tmp_path / "model.safetensors"),
        ),
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True),
    ]
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = task.model.eval()(x)
        assert all(torch.equal(model.eval()(x), expected) for model in again)
    assert again[1].pretrained_cfg["mean"] == config["mean"]
    assert (tmp_path / "recipe.json").read_text() == TINY.to_json()


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    first = train(ToyTask(), output=tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    again = train(ToyTask(), output=tmp_path)
    assert again == {**first, "seconds": again["seconds"]}
    after = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert {k: v for k, v in after.items() if k != "summary.json"} == {
        k: v for k, v in before.items() if k != "summary.json"
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "adamm"}, r"optimizer='adamm': expected one of .*adamw"),
        ({"batch_size": 41}, r"batch_size=41 with 40 training images"),
        ({"precision": "fp16"}, r"precision='fp16': fp16 needs a GPU"),
        ({"grad_checkpointing": True}, r"grad_checkpointing=True: toy does not support it"),
    ],
)
def test_what_cannot_run_is_refused_before_it_starts(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    recipe: TrainingRecipe = replace(TOY, **changes)
    with pytest.raises(ValueError, match=message):
        train(ToyTask(recipe), output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_timm_model_that_cannot_recompute_activations_is_refused() -> None:
    with pytest.raises(ValueError, match="grad_checkpointing=True"):
        enable_grad_checkpointing(replace(TINY, grad_checkpointing=True), timm.create_model("inception_v3"))


def test_what_goes_to_loader_processes_pickles_without_the_model(tmp_path: Path) -> None:
    task = ClassificationTask(TINY)
    loader = _Loop(task, RunWriter(tmp_path)).loader
    for sent in (loader.collate_fn, loader.worker_init_fn, task.train_data.transform):
        assert len(pickle.dumps(sent)) < 10_000


def test_tensorboard_has_the_numbers_of_the_tables(tmp_path: Path) -> None:
    train(ToyTask(), output=tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    table = rows(tmp_path / "train.csv")
    found = {event.step: event.value for event in events.Scalars("train/loss")}
    assert found == pytest.approx({row["step"]: row["loss"] for row in table}, rel=1e-6)
    assert [event.step for event in events.Scalars("validation/distance")] == [5, 10, 15]
