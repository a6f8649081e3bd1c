"""The checks that diffusers makes of its models, on ours, with nonzero final layers so that no test compares zeros."""

import json

import pytest
import torch
from awake_dit import TINY, AwakeDiT, batch
from diffusers import DiffusionPipeline
from diffusers.training_utils import EMAModel
from torch._dynamo.testing import CompileCounterWithBackend

from lineardiff.models.dit import DiT, DiTOutput

ARMS = ["mhsa", "vca"]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="offloading moves weights to a GPU")


@pytest.fixture(params=ARMS)
def model(request):
    torch.manual_seed(0)
    return AwakeDiT(**TINY, attention=request.param).eval()


@torch.no_grad()
def answer(model, device="cpu"):
    x, t, y = (value.to(device) for value in batch())
    sample = model(x.to(model.dtype), t, y).sample
    assert sample.abs().mean() > 0.01
    return sample


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=5e-5)


@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
@pytest.mark.parametrize("variant", [None, "fp16"])
def test_save_and_load(model, tmp_path, variant, low_cpu_mem_usage):
    model.save_pretrained(tmp_path, variant=variant)
    suffix = f".{variant}" if variant else ""
    assert (tmp_path / f"diffusion_pytorch_model{suffix}.safetensors").is_file()
    loaded, info = AwakeDiT.from_pretrained(
        tmp_path, variant=variant, low_cpu_mem_usage=low_cpu_mem_usage, output_loading_info=True
    )
    assert not any(info.values())
    assert not loaded.training
    assert_same(answer(loaded), answer(model))
    if variant:
        with pytest.raises(OSError, match="diffusion_pytorch_model"):
            AwakeDiT.from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("low_cpu_mem_usage", [True, False])
def test_dtype_on_load(model, tmp_path, dtype, low_cpu_mem_usage):
    model.save_pretrained(tmp_path)
    loaded = AwakeDiT.from_pretrained(tmp_path, torch_dtype=dtype, low_cpu_mem_usage=low_cpu_mem_usage)
    assert loaded.dtype == dtype
    assert {value.dtype for value in loaded.state_dict().values()} == {dtype}
    assert_same(answer(loaded), answer(model.to(dtype)))


def test_the_saved_config_makes_the_same_network(model, tmp_path):
    model.save_config(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["_class_name"] == "AwakeDiT"
    assert (saved["sample_size"], saved["attention"]) == ([8, 12], model.config.attention)
    again = AwakeDiT.from_config(AwakeDiT.load_config(tmp_path)).eval()
    assert again.sample_size == (8, 12)
    again.load_state_dict(model.state_dict())
    assert_same(answer(again), answer(model))


def test_determinism(model):
    assert torch.equal(answer(model), answer(model))


def test_tuple_and_output(model):
    (first,) = model(*batch(), return_dict=False)
    output = model(*batch())
    assert isinstance(output, DiTOutput)
    assert torch.equal(output.sample, first)
    assert torch.equal(output[0], first)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_shards(model, tmp_path, variant):
    model.save_pretrained(tmp_path, max_shard_size="60KB", variant=variant)
    index = f"diffusion_pytorch_model.safetensors.index{'.' + variant if variant else ''}.json"
    names = set(json.loads((tmp_path / index).read_text())["weight_map"].values())
    assert len(names) > 1
    assert {path.name for path in tmp_path.glob("*.safetensors")} == names
    assert_same(answer(AwakeDiT.from_pretrained(tmp_path, variant=variant)), answer(model))


@pytest.mark.parametrize("attention", ["mhsa", "vca"])
def test_device_map(attention, tmp_path):
    torch.manual_seed(0)
    model = AwakeDiT(**TINY, attention=attention).eval()
    model.save_pretrained(tmp_path / "model", max_shard_size="60KB")
    device_map = {name: "cpu" for name, _ in model.named_children()}
    device_map |= {"pos_embed": "cpu", "blocks": "disk"}
    loaded = AwakeDiT.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert next(loaded.blocks.parameters()).is_meta
    assert_same(answer(loaded), answer(model))


def test_a_block_is_never_split(model):
    assert model._get_no_split_modules("auto") == ["DiTBlock"]
    assert type(model.blocks[0]).__name__ == "DiTBlock"


def test_training_step_and_moving_average(model):
    ema = EMAModel(model.parameters(), decay=0.9, model_cls=AwakeDiT, model_config=model.config)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model.train()(*batch()).sample.square().mean().backward()
    optimizer.step()
    ema.step(model.parameters())
    for old, new, mean in zip(before, model.parameters(), ema.shadow_params, strict=True):
        decay = ema.cur_decay_value
        torch.testing.assert_close(mean, decay * old + (1 - decay) * new.detach())
        assert not torch.equal(old, new)


def test_moving_average_is_saved_and_loaded(model, tmp_path):
    EMAModel(model.parameters(), model_cls=AwakeDiT, model_config=model.config).save_pretrained(tmp_path)
    loaded = EMAModel.from_pretrained(tmp_path, AwakeDiT)
    assert all(torch.equal(a, b) for a, b in zip(loaded.shadow_params, model.parameters(), strict=True))


def test_gradient_checkpointing(model):
    assert model._supports_gradient_checkpointing
    assert not model.is_gradient_checkpointing
    calls = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))

    def loss_and_gradients():
        calls.clear()
        torch.manual_seed(3)
        model.train().zero_grad()
        loss = model(*batch()).sample.square().mean()
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    loss, gradients = loss_and_gradients()
    assert len(calls) == 2
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
    again, same = loss_and_gradients()
    assert len(calls) == 4  # every block once more in the backward pass
    assert_same(again, loss)
    for a, b in zip(same, gradients, strict=True):
        assert_same(a, b)
    model.disable_gradient_checkpointing()
    assert not model.is_gradient_checkpointing


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
def test_layerwise_casting(model, storage):
    exact = answer(model)
    model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    kept = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert {"x_embedder.proj.weight"} <= kept
    assert not any(".qkv." in name or ".mlp." in name for name in kept)
    with torch.no_grad():
        cast = model(*batch()).sample
    error = (cast - exact).norm() / exact.norm()
    assert 0 < error < (0.3 if storage.itemsize == 1 else 0.03)


@pytest.mark.parametrize("attention", ARMS)
def test_compiled_whole_without_breaks_or_recompiles(attention):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AwakeDiT(**TINY, attention=attention).eval()
    expected = answer(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(answer_of(compiled), expected)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(answer_of(compiled), expected)


def test_compiled_for_every_batch_size():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AwakeDiT(**{**TINY, "depth": 1}, attention="vca").eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    answer_of(compiled)
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for B in (2, 5):
            assert_same(compiled(*batch(B)).sample, model(*batch(B)).sample)


def test_compiled_in_training():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AwakeDiT(**{**TINY, "depth": 1, "class_dropout_prob": 0.5}, attention="vca").train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = []
    for network in (model, compiled):
        model.zero_grad()
        torch.manual_seed(1)  # of the labels dropped
        network(*batch()).sample.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("attention", ARMS)
def test_compiled_block_by_block(attention):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = AwakeDiT(**{**TINY, "depth": 4}, attention=attention).eval()
    expected = answer(model)
    graphs = CompileCounterWithBackend("aot_eager")
    model.compile_repeated_blocks(backend=graphs, fullgraph=True)
    assert_same(answer_of(model), expected)
    assert graphs.frame_count == (
        2 if attention == "vca" else 1
    )  # l_init, a number of each depth, becomes an input
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(answer_of(model), expected)


@torch.no_grad()
def answer_of(network):
    return network(*batch()).sample


@needs_gpu
@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_group_offload(model, offload_type):
    expected = answer(model)
    model.enable_group_offload(
        torch.device("cuda"), torch.device("cpu"), offload_type=offload_type, num_blocks_per_group=1
    )
    assert_same(answer(model, "cuda").cpu(), expected)


@needs_gpu
def test_cpu_offload(model, tmp_path):
    model.save_pretrained(tmp_path)
    device_map = {name: "cuda" for name, _ in model.named_children()} | {"pos_embed": "cuda", "blocks": "cpu"}
    loaded = AwakeDiT.from_pretrained(tmp_path, device_map=device_map)
    assert_same(answer(loaded, "cuda").cpu(), answer(model))


def test_part_of_a_pipeline(tmp_path):
    torch.manual_seed(0)

    class Pipeline(DiffusionPipeline):
        def __init__(self, transformer):
            super().__init__()
            self.register_modules(transformer=transformer)

    model = DiT(**TINY, attention="vca")
    Pipeline(model).save_pretrained(tmp_path)
    loaded = Pipeline.from_pretrained(tmp_path, transformer=DiT.from_pretrained(tmp_path / "transformer"))
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.transformer.parameters(), model.parameters(), strict=True)
    )
