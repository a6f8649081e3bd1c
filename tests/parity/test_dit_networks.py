"""DiT-S/2 and SiT-S/2 against the outputs of their authors' code, recorded in shared/parity."""

import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from lineardiff.models import create_generator

SHAPE = (2, 4, 32, 32)


def draw(key, shape):
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.fixture(scope="module", params=["dit", "sit"])
def recorded(request, shared_data):
    """The file of the authors' answers, its metadata, and our network with the same weights."""
    file = safe_open(shared_data.parent / "parity" / f"{request.param}-s-2_256.safetensors", "pt")
    model = create_generator(f"{request.param}_s_2").eval()
    shapes = json.loads(file.metadata()["keys"])
    weights = {name: 0.02 * draw(name, shape) for name, shape in shapes.items() if name != "pos_embed"}
    model.load_state_dict({**weights, "pos_embed": model.pos_embed})
    return file, file.metadata(), model


def test_names_shapes_and_count_of_parameters(recorded):
    _, metadata, model = recorded
    own = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert own == json.loads(metadata["keys"])
    assert sum(p.numel() for p in model.parameters()) == int(metadata["params"])


def test_position_embedding(recorded):
    file, _, model = recorded
    rows = file.get_tensor("pos_embed")
    assert torch.equal(model.pos_embed[:, : rows.shape[1]], rows)


@torch.no_grad()
def test_output(recorded):
    file, metadata, model = recorded
    t, y = torch.tensor(json.loads(metadata["t"])), torch.tensor(json.loads(metadata["y"]))
    torch.testing.assert_close(
        model(draw("latent", SHAPE), t, y).sample, file.get_tensor("output"), rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_classifier_free_guidance_on_three_channels(recorded):
    file, metadata, model = recorded
    x = draw("latent", SHAPE)[:1]
    t = torch.tensor(json.loads(metadata["t"])[:1])
    cond, uncond = (model(x, t, torch.tensor([label])).sample for label in json.loads(metadata["y"]))
    guided = uncond[:, :3] + 4.0 * (cond[:, :3] - uncond[:, :3])
    ours = torch.cat([torch.cat([guided, rest[:, 3:]], dim=1) for rest in (cond, uncond)])
    torch.testing.assert_close(ours, file.get_tensor("cfg4"), rtol=1e-4, atol=1e-4)
