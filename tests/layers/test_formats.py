"""A weight is a format: one that nobody in the engine knows is loaded, planned, run and streamed beside."""

import json
from types import SimpleNamespace

import pytest
import torch
from engines import LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params
from expert_cases import experts_of
from safetensors.torch import load_file, save_file
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from nanoinfer.common import exact
from nanoinfer.kernels.experts.routing import GatedActivation
from nanoinfer.layers.formats import registry
from nanoinfer.layers.formats.base import DENSE, CheckpointTensors, WeightFormat
from nanoinfer.layers.formats.parted import Parted, merge_formats
from nanoinfer.layers.linear import Linear, share_scratch

METHOD = "int8-rows"


class Int8Rows(WeightFormat):
    """8-bit integers, and a float32 scale for each row."""

    def __init__(self, settings=None, tensors=None):
        if settings.get("bits") != 8:
            raise ValueError(f"bits is {settings.get('bits')} in the quantization_config: {METHOD} has 8")

    def below(self, path, held=None):
        return DENSE if path == "lm_head" else self

    def allocate(self, module, num_rows, in_features, *, cut=None, dtype, device):
        values = torch.empty(num_rows, in_features, dtype=torch.int8, device=device)
        module.dtype = dtype
        module.values = torch.nn.Parameter(values, requires_grad=False)
        module.scales = torch.nn.Parameter(torch.empty(num_rows, 1, device=device), requires_grad=False)

    def views(self, module, begin, end):
        return {"weight": module.values[begin:end], "weight_scale": module.scales[begin:end]}

    def fill_with_noise(self, module, generator):
        module.values.random_(-127, 128, generator=generator)
        module.scales.fill_(0.02 / 74)

    def matrix(self, module):
        return (module.values * module.scales).to(module.dtype)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setattr(registry, "FORMATS", {METHOD: Int8Rows})


@pytest.fixture
def checkpoints(tmp_path):
    """The same weights as integers with scales, and dense."""
    for name in ("quantised", "dense"):
        path = make_checkpoint("qwen3", tmp_path / name, **SMALL)
        tensors = load_file(path / "model.safetensors")
        for key in [key for key in tensors if "_proj." in key]:
            scales = tensors[key].abs().amax(1, keepdim=True) / 127
            values = (tensors[key] / scales).round()
            tensors[key] = values * scales
            if name == "quantised":
                tensors[key], tensors[f"{key}_scale"] = values.to(torch.int8), scales.contiguous()
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    settle(tmp_path / "quantised", dict(quant_method=METHOD, bits=8))
    return tmp_path / "quantised", tmp_path / "dense"


def settle(path, quantization) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | dict(quantization_config=quantization)))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.sampled("0")
def test_a_quantised_model_has_the_bits_of_its_dequantised_weights_in_every_mode(checkpoints, seed):
    quantised, dense = checkpoints
    prompts, params = random_prompts(4, 20, 90, seed=seed), some_params(4, logprobs=3)
    wanted = run(make_engine(dense), prompts, params)
    for arguments in (
        {},
        dict(enable_cpu_offload=True, resident_kv_limit=0, num_ring_slots=2, ring_slot_bytes=2 * LAYER_BLOCK_BYTES),
    ):
        engine = make_engine(quantised, SimulatedRuntime(seed), **arguments)
        assert run(engine, prompts, params) == wanted
        assert (engine.stats()["streamed_bytes"] > 0) == bool(arguments)
        assert_pools_as_before(engine)


def test_bytes_are_those_of_the_format(checkpoints):
    specs = [make_engine(path).runner.spec for path in checkpoints]
    held = [make_engine(path).plan.weight_bytes for path in checkpoints]
    model = make_engine(checkpoints[1]).runner.model
    projections = [weight for name, weight in model.named_parameters() if "_proj." in name]
    saved = sum(3 * weight.numel() - 4 * len(weight) for weight in projections)  # less a scale for each row
    assert held[1] - held[0] == specs[1].weight_bytes - specs[0].weight_bytes == saved > 0
    assert specs[0].embedding_bytes == specs[1].embedding_bytes


def test_random_weights_of_a_format(checkpoints):
    engine = make_engine(checkpoints[0], load_format="dummy")
    assert run(engine, random_prompts(1), some_params(1))[0][0][2] == "length"


WHAT_TO_GIVE = "give the checkpoint in 16 bits, .* or one of int8-rows"


def test_what_a_format_does_not_have_is_refused(checkpoints):
    settle(checkpoints[0], dict(quant_method=METHOD, bits=4))
    with pytest.raises(ValueError, match="bits is 4 in the quantization_config: int8-rows has 8"):
        make_engine(checkpoints[0])
    settle(checkpoints[0], dict(quant_method="int8-row"))
    with pytest.raises(
        ValueError,
        match=rf"quant_method='int8-row', .* \(did you mean 'int8-rows'\?\): {WHAT_TO_GIVE}",
    ):
        make_engine(checkpoints[0])


@pytest.mark.parametrize("method", [None, 8, ["int8-rows"], {"int8-rows": 1}])
def test_a_method_that_is_no_name_is_refused(method):
    with pytest.raises(ValueError, match=f"quant_method=.*which is not supported.*: {WHAT_TO_GIVE}"):
        registry.formats_of({"quant_method": method, "bits": 8}, CheckpointTensors(torch.float32))


def test_integers_are_not_taken_for_numbers(checkpoints):
    settle(checkpoints[0], None)
    with pytest.raises(ValueError, match="has no place for: .*weight_scale"):
        make_engine(checkpoints[0])


def test_any_formats_may_be_those_of_a_merged_projection():
    ours = Int8Rows(dict(bits=8))
    assert merge_formats([ours, ours], [64, 32]) is ours
    formats = SimpleNamespace(of_held=dict(a=DENSE, b=ours).get)
    held = Linear(16, dict(a=64, b=32), dtype=torch.float32, device="cpu", formats=formats)
    share_scratch(held, dtype=torch.float32, device="cpu")
    held.fill_with_noise(torch.Generator().manual_seed(0))
    assert isinstance(held.weights, Parted)
    views, x = held.checkpoint_views(), torch.randn(3, 16)
    lower = views["b.weight"] * views["b.weight_scale"]
    assert torch.equal(held(x), exact.linear(x, torch.cat((views["a.weight"], lower))))


def test_experts_refuse_a_format_that_their_kernels_cannot_read():
    with pytest.raises(ValueError, match="experts' gate_proj and up_proj are Int8Rows: kernels of experts read"):
        experts_of(
            2, 16, 16, GatedActivation(name="silu"), formats=Int8Rows({"bits": 8}), dtype=torch.float32, device="cpu"
        )
