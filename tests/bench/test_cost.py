import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lineardiff import ops
from lineardiff.bench.cost import multiply_adds, parameters
from lineardiff.layers import VisualContrastAttention


def vit_multiply_adds(*, grid: int, patch: int, chans: int, dim: int, depth: int, classes: int) -> int:
    """Closed form of a ViT with a class token and MLP ratio 4, the two attention products included."""
    n = grid * grid + 1
    block = n * dim * 3 * dim + 2 * n * n * dim + n * dim * dim + 2 * n * dim * 4 * dim
    return grid * grid * chans * patch * patch * dim + depth * block + dim * classes


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_multiply_adds_equal_the_closed_form_of_a_vit(device: str) -> None:
    with torch.device(device):
        size = {"img_size": 48, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
        model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **size)
    expected = vit_multiply_adds(grid=6, patch=8, chans=3, dim=32, depth=2, classes=7)
    assert multiply_adds(model, 48) == expected


def test_multiply_adds_of_deit_tiny_are_those_of_the_papers() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_patch16_224")
    cost = multiply_adds(model, (224, 224))
    assert cost == vit_multiply_adds(grid=14, patch=16, chans=3, dim=192, depth=12, classes=1000)
    assert round(cost / 1e9, 1) == 1.3  # the DeiT paper rounds 1.25 G to 1.3 G
    assert parameters(model) == 5_717_416


def test_counting_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 4 * 2, 3)).train()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    assert multiply_adds(model, (6, 4), in_chans=1) == 4 * 2 * 2 * 9 + 2 * 4 * 2 * 3
    assert model.training
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())


def test_a_shared_parameter_counts_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert parameters(model) == 9 + 3 + 3


@pytest.mark.parametrize("backend", ["cpu", "portable", "reference"])
def test_torchs_counter_sees_every_backend(backend: str) -> None:
    """The compiled kernel is one opaque op, whose cost PyTorch knows only because it is registered."""
    reason = next(b.reason for b in ops.list_backends() if b.name == backend)
    if reason:
        pytest.skip(reason)
    N, n, dim = 8 * 8, 4 * 4, 64
    layer = VisualContrastAttention(dim, 2, contrast_grid=(4, 4), grid_size=(8, 8))
    expected = 4 * N * dim**2 + 7 * n * N * dim + 9 * N * dim  # projections, both stages, convolution
    with torch.no_grad(), ops.backend(backend):
        with FlopCounterMode(display=False) as counter:
            layer(torch.zeros(1, N, dim))
        # Pooling is no matrix product; the reference pools the tokens by one, and forms both maps.
        assert counter.get_total_flops() // 2 == pytest.approx(expected, rel=0.05)
        model = timm.create_model("vca_deit_tiny_patch16_224", img_size=112)
        with FlopCounterMode(display=False) as counter:
            model.eval()(torch.zeros(1, 3, 112, 112))
        assert counter.get_total_flops() // 2 == pytest.approx(multiply_adds(model, 112), rel=0.01)


def test_the_count_does_not_depend_on_the_backend_in_use() -> None:
    model = timm.create_model("vca_deit_tiny_patch16_224", img_size=112, depth=1)
    expected = multiply_adds(model, 112)
    for name in [backend.name for backend in ops.list_backends() if backend.reason is None]:
        with ops.backend(name):  # "cpu" cannot run on the meta device, where the count is made
            assert multiply_adds(model, 112) == expected
