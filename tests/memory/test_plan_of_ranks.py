"""`nanoinfer plan` for several GPUs: each one's share, and what is not divided."""

import pytest

import nanoinfer
from nanoinfer.execution.group import MAILBOX_BYTES

CARD = dict(gpu="RTX 4090", host_memory_limit="64GiB", max_model_len=32768, batch=1)


def test_each_gpu_has_its_share():
    one, two = (nanoinfer.plan("qwen3-4b", **CARD, tensor_parallel_size=size) for size in (1, 2))
    assert one.notes == () or not any("GPUs" in note for note in one.notes)
    assert two.budget_bytes == one.budget_bytes - 2 * MAILBOX_BYTES
    assert 2 * two.host_budget_bytes == one.host_budget_bytes
    assert two.kv_bytes * 2 == one.kv_bytes
    # The layers are halved, the embeddings are not: a rank has its half of the head besides.
    assert 0.5 < two.memory.weight_bytes / one.memory.weight_bytes < 0.65
    (note,) = [note for note in two.notes if "each of 2 GPUs" in note]
    assert "exchanges 72 sums" in note


def test_a_kv_head_that_cannot_be_shared_is_told_of():
    found = nanoinfer.plan("gemma-4-12b", **CARD, tensor_parallel_size=2)
    assert any("repeated" in note for note in found.notes)
    assert not any("repeated" in note for note in nanoinfer.plan("qwen3-4b", **CARD, tensor_parallel_size=8).notes)


def test_heads_that_do_not_divide_are_refused_with_what_works():
    with pytest.raises(ValueError, match="28 query heads and 4 KV heads cannot be divided .* give 1 or 2 or 4"):
        nanoinfer.plan("qwen2.5-7b", **CARD, tensor_parallel_size=8)
