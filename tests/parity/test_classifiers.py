"""PVT and CSwin give the logits of their authors' code, with weights under the authors' names."""

from pathlib import Path

import pytest
import timm
import torch
from recorded import normal, read

import lineardiff

FILES = {
    "pvt_v1_tiny": "pvt_tiny",
    "cswin_tiny_224": "cswin_tiny_1-2-21-1",
    "cswin_tiny_24181_224": "cswin_tiny_2-4-18-1",
}


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_the_authors(name: str, parity_data: Path) -> None:
    recorded = read(parity_data / f"{FILES[name]}.safetensors")
    model = timm.create_model(name).eval()
    report = lineardiff.load_baseline(model, recorded.weights())
    assert set(report.loaded) == set(model.state_dict())  # strictly: every weight, and none left over
    assert report.unused == report.vca_terms == report.classifier == ()
    assert sum(p.numel() for p in model.parameters()) == int(recorded.metadata["params"])
    with torch.no_grad():
        logits = model(normal("image", 2, 3, 224, 224))
    torch.testing.assert_close(logits, recorded.tensors["logits"], rtol=1e-4, atol=1e-4)
