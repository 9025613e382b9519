"""When the head is streamed: where that is faster or nothing else fits, or what may stay is less than its bytes."""

import pytest
from described import GPU

from nanoinfer.config import EngineConfig
from nanoinfer.memory.forecaster import plan as forecast
from nanoinfer.memory.limits import TooSmall
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.search import best_plan

GIB = 2**30
SMALL_STEPS = dict(max_model_len=2048, max_num_seqs=1, max_num_batched_tokens=256)


@pytest.fixture
def plan(specs_of):
    def make(shape: str, gib: float, *, may_pin: bool = True, **arguments):
        config = EngineConfig(model="unused", **SMALL_STEPS | arguments)
        spec, sizes = specs_of(shape).of(config), dict(device=GPU, may_pin=may_pin)
        found = best_plan(Planner(config, spec, budget_bytes=int(gib * GIB), host_available_bytes=64 * GIB, **sizes))
        assert found.total_bytes <= found.budget_bytes
        assert found.head_bytes in (0, spec.head_bytes)
        return found

    return make


@pytest.mark.parametrize("shape", ["qwen3-4b", "qwen3-8b"])  # tied, and not
def test_it_is_streamed_where_nothing_fits_that_has_it_on_the_gpu(plan, specs_of, shape):
    spec = specs_of(shape).of(EngineConfig(model="unused"))
    pieces = len(spec.piece_bytes) - 1
    plans = []
    for tenths in range(40, 0, -1):
        try:
            plans.append(plan(shape, 0.1 * tenths))
        except TooSmall:
            break
    smallest = plans[-1]
    assert smallest.budget_bytes < spec.head_bytes + 2 * max(spec.piece_bytes)
    assert smallest.head_bytes and len(smallest.streamed_pieces) == pieces
    whole = plan(shape, 24)
    assert not whole.head_bytes and not whole.streamed_bytes
    for found in plans:
        pieces_bytes = sum(spec.piece_bytes[piece] for piece in found.streamed_pieces)
        assert found.streamed_bytes == pieces_bytes + found.head_bytes
        assert len(found.streamed_pieces) % 2 == 0 or len(found.streamed_pieces) == pieces
        assert ("weights and head" in found.one_line("resident")) == (found.head_bytes > 0)


def test_slices_are_an_even_number_of_at_most_a_layers_bytes(specs_of):
    for shape in ("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "gpt-oss-20b"):
        for quantization in (None, "int8"):
            config = EngineConfig(model="unused", head_quantization=quantization)
            spec = specs_of(shape).of(config)
            assert len(spec.slice_bytes) % 2 == 0 and max(spec.slice_bytes) <= max(spec.piece_bytes), shape
            assert spec.head_bytes <= sum(spec.slice_bytes) < spec.head_bytes + 2**16
            assert sum(spec.head_rows) == spec.vocab_size and not any(n % 2048 for n in spec.head_rows[:-1])
            assert spec.tied_embeddings == (
                spec.head_bytes == spec.embedding_bytes and shape in ("qwen3-0.6b", "qwen3-4b")
            )


def test_a_tied_head_stays_where_kernels_cannot_look_it_up(plan):
    assert plan("qwen3-4b", 1.5, resident_weights_limit=0).head_bytes
    assert not plan("qwen3-4b", 4, resident_weights_limit=0, may_pin=False).head_bytes
    assert plan("qwen3-8b", 4, resident_weights_limit=0, may_pin=False).head_bytes
    with pytest.raises(TooSmall):
        plan("qwen3-4b", 1, may_pin=False)
    with pytest.raises(ValueError, match="can be streamed: the head, norms and the first layer's"):
        plan("qwen3-4b", 24, cpu_offload_gb=7, may_pin=False)
    with pytest.raises(ValueError, match="can be streamed: norms and the first layer's"):
        plan("qwen3-4b", 24, cpu_offload_gb=8)
    with pytest.raises(TooSmall):
        plan("qwen3-8b", 2, cpu_offload_gb=0)


def test_a_forecast_says_that_it_is_streamed():
    given = dict(gpu_memory_limit="1.5GiB", host_memory_limit="64GiB", max_model_len=2048, batch=1)
    text = forecast("qwen3-8b", **given).report()
    assert "; the head, 1.16 GiB, is streamed in slices" in text and "for layers and a head that are streamed" in text
    assert "the head, which is streamed" not in text
