"""torch.export and ONNX with dynamic batch and image size; two processes with DDP."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import timm
import torch
from torch.export import Dim

import lineardiff  # registers the models  # noqa: F401

SIZES = ((2, 3, 64, 80), (3, 3, 48, 112), (1, 3, 96, 96))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    options = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "contrast_grid": (4, 5)}
    return timm.create_model("vca_deit_tiny_patch16_224", dynamic_img_size=True, **options).eval()


def dynamic():
    batch, height, width = (
        Dim("batch", min=1, max=64),
        Dim("height", min=4, max=64),
        Dim("width", min=5, max=64),
    )
    return ({0: batch, 2: 8 * height, 3: 8 * width},)


def test_export_serves_other_batches_and_sizes(model):
    exported = torch.export.export(model, (torch.randn(*SIZES[0]),), dynamic_shapes=dynamic()).module()
    for size in SIZES:
        x = torch.randn(*size)
        assert torch.allclose(exported(x), model(x), atol=1e-5)


def test_onnx_runtime_agrees_to_1e_4(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime", reason="the export extra is not installed")
    path = tmp_path / "model.onnx"
    x = torch.randn(*SIZES[0])
    torch.onnx.export(model, (x,), path, dynamo=True, dynamic_shapes=dynamic(), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for size in SIZES:
        x = torch.randn(*size)
        out = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        assert np.abs(out - model(x).detach().numpy()).max() <= 1e-4


def test_two_processes_have_the_gradients_of_one(tmp_path):
    script = tmp_path / "ddp.py"
    script.write_text(
        textwrap.dedent(
            """
            import pathlib, sys, timm, torch, lineardiff
            from torch import distributed as dist
            from torch.nn.parallel import DistributedDataParallel

            def model():
                torch.manual_seed(0)
                options = dict(img_size=32, patch_size=4, embed_dim=48, depth=2, num_heads=3, contrast_grid=(3, 3))
                return timm.create_model("vca_deit_tiny_patch16_224", **options)

            dist.init_process_group("gloo")
            x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
            alone, together = model(), DistributedDataParallel(model())
            alone(x).square().mean().backward()
            together(x[2 * dist.get_rank():][:2]).square().mean().backward()
            for (name, a), b in zip(alone.named_parameters(), together.module.parameters()):
                assert torch.allclose(a.grad, b.grad, atol=1e-5), name
            (pathlib.Path(sys.argv[1]) / f"equal-{dist.get_rank()}").touch()
            dist.destroy_process_group()
            """
        )
    )
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        str(tmp_path),
    ]
    result = subprocess.run(launch, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert sorted(p.name for p in tmp_path.glob("equal-*")) == ["equal-0", "equal-1"]
