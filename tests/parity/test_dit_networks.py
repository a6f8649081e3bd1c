"""DiT-S/2 and SiT-S/2 against the outputs of their authors' code, recorded in shared/parity."""

import json

import pytest
import torch
from recorded import normal, read

from lineardiff.generation import guided
from lineardiff.models import create_dit

SHAPE = (2, 4, 32, 32)


@pytest.fixture(scope="module", params=["dit", "sit"])
def recorded(request, parity_data):
    """Return the authors' outputs, the file's metadata, and our network with the same weights."""
    file = read(parity_data / f"{request.param}-s-2_256.safetensors")
    model = create_dit(f"{request.param}_s_2").eval()
    model.load_state_dict({**file.weights(), "pos_embed": model.pos_embed})
    return file.tensors, file.metadata, model


def test_names_shapes_and_count_of_parameters(recorded):
    _, metadata, model = recorded
    own = {name: list(value.shape) for name, value in model.state_dict().items()}
    assert own == json.loads(metadata["keys"])
    assert sum(p.numel() for p in model.parameters()) == int(metadata["params"])


def test_position_embedding(recorded):
    answers, _, model = recorded
    rows = answers["pos_embed"]
    assert torch.equal(model.pos_embed[:, : rows.shape[1]], rows)


@torch.no_grad()
def test_output(recorded):
    answers, metadata, model = recorded
    t, y = torch.tensor(json.loads(metadata["t"])), torch.tensor(json.loads(metadata["y"]))
    torch.testing.assert_close(
        model(normal("latent", *SHAPE), t, y).sample, answers["output"], rtol=1e-4, atol=1e-4
    )


@torch.no_grad()
def test_classifier_free_guidance_on_three_channels(recorded):
    answers, metadata, model = recorded
    label, null_label = json.loads(metadata["y"])
    denoiser = guided(
        lambda x, t, labels: model(x, t, labels).sample,
        torch.tensor([label]),
        null_label=null_label,
        scale=4.0,
        channels=3,
    )
    answer = denoiser(normal("latent", *SHAPE)[:1], torch.tensor(json.loads(metadata["t"])[:1]))
    # of the two halves that the authors' function returns, the conditional one
    torch.testing.assert_close(answer, answers["cfg4"][:1], rtol=1e-4, atol=1e-4)
