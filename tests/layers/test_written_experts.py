"""What `nanoinfer quantize` writes of checkpoints with one tensor for all experts of a layer: the experts apart."""

import json

import pytest
import torch
from dense_model import dense_logits
from gpt_oss import mxfp4_checkpoint, rewrite
from online import QUIET, expert_matrices, load, matrices
from safetensors.torch import load_file
from tiny_models import make_checkpoint, random_tokens
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from nanoinfer.config import QUANTISED
from nanoinfer.measure.in_transformers import load_in_transformers
from nanoinfer.weights.write import quantise_checkpoint

SIZES = dict(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, hidden_size=64, dtype=torch.bfloat16)
OF_FAMILY = {
    "qwen3_moe": dict(intermediate_size=96, moe_intermediate_size=32, num_experts=5),
    "mixtral": dict(intermediate_size=64),
}


def stored(path) -> dict[str, torch.Tensor]:
    """Its tensors as bytes; by the names of Mixtral's modules in memory."""
    tensors = {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}
    return {name.replace("block_sparse_moe", "mlp"): one.view(torch.uint8) for name, one in tensors.items()}


def same(found, wanted) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(one, wanted[name]) for name, one in found.items())


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("family", OF_FAMILY)
@pytest.mark.sampled("qwen3_moe-int4", "mixtral-fp8")
def test_files_are_those_of_the_checkpoint_whose_experts_are_apart(family, name, tmp_path, monkeypatch):
    """Also where a tensor is read in pieces of two experts, and where there are several files."""
    sizes = SIZES | OF_FAMILY[family]
    sources = [make_checkpoint(family, tmp_path / f"{is_fused}", fused=is_fused, **sizes) for is_fused in (False, True)]
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(sources[1] / "model.safetensors")
    monkeypatch.setattr("nanoinfer.weights.fill._BATCH_BYTES", 20_000)
    monkeypatch.setattr("nanoinfer.weights.write._SHARD_BYTES", 60_000)
    apart, fused = (
        quantise_checkpoint(source, tmp_path / f"{source.name}-{name}", name, **QUIET) for source in sources
    )
    assert len(list(fused.glob("*.safetensors"))) > 1 and same(stored(fused), stored(apart))
    assert same(expert_matrices(load(fused)), expert_matrices(load(sources[1], name)))


def test_transformers_reads_what_was_written(tmp_path):
    pytest.importorskip("compressed_tensors", reason="transformers reads these checkpoints with it")
    source = make_checkpoint("mixtral", tmp_path / "wide", fused=True, **SIZES | OF_FAMILY["mixtral"])
    out = quantise_checkpoint(source, tmp_path / "out", "int4-symmetric", **QUIET)
    found = AutoModelForCausalLM.from_pretrained(out, quantization_config=CompressedTensorsConfig(dequantize=True))
    ours = expert_matrices(load(out))
    for name, one in found.state_dict().items():
        if "experts" in name:
            parts = ("w1", "w3") if "gate_up_proj" in name else ("w2",)
            prefix = name.rpartition(".")[0]
            for expert, matrix in enumerate(one):
                assert torch.equal(matrix, torch.cat([ours[f"{prefix}.{expert}.{part}.weight"] for part in parts]))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.sampled("int4", "int8", "fp8")
def test_gpt_oss_is_written_and_read(name, tmp_path, monkeypatch):
    """From MXFP4, which is expanded first, as from the expanded weights; what is read is what that expands to."""
    packed, wide = mxfp4_checkpoint(tmp_path)
    rewrite(packed, load_file(packed / "model.safetensors"), dtype=None)  # as published
    monkeypatch.setattr("nanoinfer.weights.fill._BATCH_BYTES", 20_000)
    out, other = (
        quantise_checkpoint(source, tmp_path / source.name / name, name, **QUIET) for source in (packed, wide)
    )
    assert same(stored(out), stored(other)) and json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    found, online = load(out, dtype="float32"), load(wide, name, dtype="float32")
    assert same(expert_matrices(found), expert_matrices(online))
    wanted = load(rewrite(wide, expanded(found, load_file(wide / "model.safetensors"))), dtype="float32")
    tokens = random_tokens(20)
    assert torch.equal(dense_logits(found, tokens), dense_logits(wanted, tokens))


def test_transformers_which_cannot_read_gpt_oss_so_is_not_asked(tmp_path):
    out = quantise_checkpoint(mxfp4_checkpoint(tmp_path)[0], tmp_path / "out", "fp8", **QUIET)
    with pytest.raises(ValueError, match="transformers does not read .*experts.0.down_proj.bias and .* more tensors"):
        load_in_transformers(out, torch.float32)


def expanded(model, tensors) -> dict[str, torch.Tensor]:
    """The wide checkpoint of a model of gpt-oss. tensors: of one whose projections have other values."""
    experts, others = expert_matrices(model), matrices(model)
    for layer in range(len(model.layers)):
        prefix = f"model.layers.{layer}.self_attn"
        names = [f"{prefix}.{name}_proj.weight" for name in "qkv"]
        rows = others[f"layers.{layer}.self_attn.qkv_proj"].split([len(tensors[name]) for name in names])
        tensors |= dict(zip(names, rows, strict=True)) | {f"{prefix}.o_proj.weight": others[f"{prefix[6:]}.o_proj"]}
        prefix = f"model.layers.{layer}.mlp.experts"
        for number in range(model.spec.sparse.num_experts):
            gate, up, down = (experts[f"{prefix}.{number}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            tensors[f"{prefix}.gate_up_proj"][number] = torch.stack((gate, up), 1).flatten(0, 1).T
            tensors[f"{prefix}.down_proj"][number] = down.T
    return tensors
