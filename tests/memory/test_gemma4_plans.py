"""Plans of Gemma 4: what its KV takes, what of it a window bounds, and what small cards run."""

import pytest

from nanoinfer.memory.forecaster import forecaster
from offload.groups import UNBOUNDED
from offload.reserve import StepReserve

GIB = 2**30
LEAST = dict(quantization="int4", head_quantization="int8")
WINDOW = 1024


def forecast(shape, gib, context=None, batch=None, **arguments):
    limits = dict(gpu_memory_limit=f"{gib}GiB", host_memory_limit="64GiB", link_gbps=None, device_gbps=None, gpu=None)
    return forecaster(shape, max_model_len=context, batch=batch, **limits, **arguments)


@pytest.mark.parametrize("context", [32_768, 131_072, 262_144])
@pytest.mark.parametrize("shape", ["gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-31b"])
def test_a_row_takes_what_full_layers_keep_and_windows_see(shape, context):
    """What the layers hold, one by one: no place of a block is empty, and blocks of unlike heads have like bytes."""
    made = forecast(shape, 32, context, 1, **LEAST)
    spec, held = made.spec, 0
    for layer in spec.kv_layers:
        state = spec.layers[layer]
        part = spec.attentions[state.shape].part
        assert state.window in (None, WINDOW)
        num_blocks = -(-context // part.block_size) if state.window is None else -(-WINDOW // part.block_size) + 1
        held += num_blocks * part.num_bytes
    taken = spec.kv_groups.num_blocks(context) * spec.layout.block_bytes
    assert 0.9 * held < taken <= 1.02 * held
    step = made.step()
    assert step.kv_bytes == taken
    assert step.memory.pool_bytes >= min(taken, 0.98 * (step.budget_bytes - step.memory.fixed_bytes))
    grows = {12: 8192, 26: 10_240, 31: 40_960}[int(shape.split("-")[2][:2])]
    assert taken - WINDOW * 1.1 * grows * len(spec.kv_layers) < context * grows < taken


@pytest.mark.parametrize(
    "shape, gib, context",
    [
        ("gemma-4-12b", 8, 262_144),
        ("gemma-4-26b-a4b", 8, 32_768),
        ("gemma-4-31b", 22, 131_072),
        ("gemma-4-e2b", 2, None),
        ("gemma-4-e4b", 4, None),
    ],
)
def test_what_small_cards_run_with_few_bits(shape, gib, context):
    for batch in (1, None):
        step = forecast(shape, gib, context, batch, **LEAST).step()
        assert step.fits and step.memory.total_bytes <= gib * GIB, step.problem
        assert step.memory.max_model_len >= (context or 131_072)
        assert batch is None or not step.memory.streamed_bytes, "weights are streamed, which have room"


@pytest.mark.parametrize("formats", [{}, LEAST])
@pytest.mark.parametrize("shape", ["gemma-4-12b", "gemma-4-26b-a4b", "gemma-4-31b"])
def test_the_blocks_of_a_step_count_where_its_size_is_chosen(shape, formats):
    """Those of layers with a window, too, which lie behind it when the step has run: 2.5 GiB of 12B's in 8,192."""
    for gib in (8, 16, 24):
        for context in (None, 32_768, 131_072):
            memory = forecast(shape, gib, context, **formats).step().memory
            room, tokens = memory.num_gpu_blocks - 1, memory.max_num_batched_tokens
            assert memory.groups.chunk_blocks(tokens) <= room
            assert memory.total_bytes <= gib * GIB
            # What the host alone has room for does not take the GPU's: few rows of such lengths run at once.
            assert memory.max_splits * memory.split_bytes <= 0.041 * gib * GIB
    reserve = StepReserve(memory.groups, 8192).resident_beside(32_768, 2, UNBOUNDED)
    assert reserve * memory.block_bytes > 1.5 * GIB
