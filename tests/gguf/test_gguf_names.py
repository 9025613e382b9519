"""The tensors of files by their names in the model: the ways in which files hold experts and merged projections."""

import io
from pathlib import Path

import pytest
from gguf_bytes import table, tensor_info, whole

from nanoinfer.gguf.names import Naming, named_parts, naming_of, skipped_part
from nanoinfer.gguf.reader import read_table

CONFIG = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, head_dim=16, model_type="llama")
F32, Q8_0 = 0, 8


def parts(naming, **tensors):
    """tensors: the sizes of each, that of a row first, and its type, by its name with _ for dots."""
    infos, at = [], 0
    for name, (sizes, kind) in tensors.items():
        infos.append(tensor_info(name.replace("__", "."), sizes, kind, at))
        count = 1
        for size in sizes:
            count *= size
        at += -(-(count * 4 if kind == F32 else count // 32 * 34) // 32) * 32
    file = read_table(Path("x.gguf"), io.BytesIO(whole(table({}, infos), bytes(at))))
    return named_parts(file, naming, CONFIG)


def test_stacked_experts_are_taken_apart():
    found = parts(Naming(), blk__1__ffn_down_exps__weight=([64, 3, 2], Q8_0), blk__1__ffn_down_exps__bias=([3, 2], F32))
    assert {name: (one.shape, one.offset) for name, one in found.items()} == {
        "model.layers.1.mlp.experts.0.down_proj.weight": ((3, 64), 0),
        "model.layers.1.mlp.experts.1.down_proj.weight": ((3, 64), 3 * 68),
        "model.layers.1.mlp.experts.0.down_proj.bias": ((3,), 0),
        "model.layers.1.mlp.experts.1.down_proj.bias": ((3,), 12),
    }


def test_gate_and_up_of_experts_in_one_tensor():
    found = parts(Naming(), blk__0__ffn_gate_up_exps__weight=([8, 6, 2], F32))
    assert {name.partition("experts.")[2]: (one.shape, one.offset) for name, one in found.items()} == {
        "0.gate_proj.weight": ((3, 8), 0),
        "0.up_proj.weight": ((3, 8), 96),
        "1.gate_proj.weight": ((3, 8), 192),
        "1.up_proj.weight": ((3, 8), 288),
    }


def test_experts_one_by_one():
    """As the first converters of Mixtral wrote them."""
    naming = naming_of("llama", CONFIG | dict(model_type="mixtral"))
    tensors = {f"blk__0__ffn_{kind}__7__weight": ([8, 6], F32) for kind in ("gate", "up", "down")}
    begin = "model.layers.0.block_sparse_moe.experts.7."
    assert list(parts(naming, **tensors)) == [f"{begin}{name}.weight" for name in ("w1", "w3", "w2")]


@pytest.mark.parametrize("name, num_heads", [("attn_q", 4), ("attn_k", 2), ("attn_qkv", 6), ("attn_v", 0)])
def test_rows_of_q_and_k_are_turned_also_in_one_tensor_with_v(name, num_heads):
    for kind in ("weight", "bias"):
        sizes = [8, 128] if kind == "weight" else [128]
        (part,) = parts(naming_of("llama", CONFIG), **{f"blk__0__{name}__{kind}": (sizes, F32)}).values()
        assert part.turned == ((num_heads, 16) if num_heads else (0, 0))
        (part,) = parts(naming_of("qwen2", CONFIG), **{f"blk__0__{name}__{kind}": (sizes, F32)}).values()
        assert part.turned == (0, 0)


def test_what_has_no_place_keeps_its_name_and_what_does_not_run_is_left_out():
    names = ("blk__0__attn_gate__weight", "odd__weight", "blk__2__attn_q__weight", "v__blk__0__ln1__weight")
    found = parts(Naming(), **{name: ([8], F32) for name in (*names, "rope_freqs__weight", "mm__0__weight")})
    assert list(found) == ["blk.0.attn_gate.weight", "odd.weight"]
    assert skipped_part("blk.2.nextn.eh_proj.weight", 2) == "layers that guess tokens ahead"
    assert skipped_part("blk.1.attn_q.weight", 2) is None and skipped_part("mm.0.weight", 2) == "weights of vision"
