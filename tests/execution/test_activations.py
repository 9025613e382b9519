"""The prefill step that an engine runs when it starts, to measure it."""

import pytest
import torch
from engines import make_engine
from tiny_models import make_checkpoint

from nanoinfer.attention.torch_backend import TorchBackend
from nanoinfer.execution.activations import Activations


def test_no_key_of_the_step_lies_behind_the_position_tables(tmp_path, monkeypatch):
    """Keys that are made of one vector are turned at their positions: a table would be read beyond its end."""
    types = ["sliding_attention", "full_attention"]
    sizes = dict(num_layers=2, attention_k_eq_v=True, num_global_key_value_heads=1)
    path = make_checkpoint("gemma4", tmp_path, layer_types=types, **sizes)
    engine = make_engine(path, block_size=32, max_model_len=48, max_num_batched_tokens=128)
    resources, seen, prefill = engine.runner.decode_program.resources, [], TorchBackend.prefill
    assert {len(table) for table in resources.model.rope_tables} == {48}

    def recorded(self, q, kv, key_range, *others):
        seen.append((key_range.kv_end.tolist(), key_range.cu_seqlens_q.tolist()))
        prefill(self, q, kv, key_range, *others)

    monkeypatch.setattr(TorchBackend, "prefill", recorded)
    with torch.inference_mode():
        Activations(resources, memory_before=0).run_each_kind()
    assert seen == [([48, 48, 32], [0, 48, 96, 128])] * 2


def test_queries_have_the_shape_of_their_layer_where_the_piece_before_was_left_out(tmp_path, monkeypatch):
    """A kernel on a GPU refuses those of another shape."""
    types = ["sliding_attention", "full_attention"] * 3
    path = make_checkpoint("gemma4", tmp_path, layer_types=types, num_layers=6, head_dim=16, global_head_dim=32)
    engine = make_engine(path, block_size=32)
    resources, seen, prefill = engine.runner.decode_program.resources, [], TorchBackend.prefill

    def recorded(self, q, kv, key_range, state, out, *others):
        seen.append((q.shape[1:], out.shape[1:], (self.spec.num_q_heads, self.spec.head_dim)))
        prefill(self, q, kv, key_range, state, out, *others)

    monkeypatch.setattr(TorchBackend, "prefill", recorded)
    with torch.inference_mode():
        Activations(resources, memory_before=0).run_each_kind()
    assert {of_spec for *_, of_spec in seen} == {(4, 16), (4, 32)}
    assert all(q == out == of_spec for q, out, of_spec in seen)


@pytest.mark.parametrize("family", ["lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_pieces_that_end_at_no_attention_are_run_by_themselves(path_of, family):
    """Of layers that keep states and have experts: what follows begins at an attention whose queries nobody made."""
    engine = make_engine(path_of(family, num_layers=12))
    with torch.inference_mode():
        Activations(engine.runner.decode_program.resources, memory_before=0).run_each_kind()
