"""Plans of LFM2-MoE, whose sparse layers lie between attentions: what cards of 4 to 24 GB run."""

import pytest

from nanoinfer.memory.forecaster import forecaster

GIB = 2**30
LEAST = dict(quantization="int4", head_quantization="int8")
SIZES = (4, 6, 8, 12, 16, 24)
# By the shape, the smallest of these on which all weights have room in 4 bits.
ALL_ON_GPU = {"lfm2-8b-a1b": 6, "lfm2.5-8b-a1b": 6, "lfm2-24b-a2b": 16}


def forecast(shape, gib, context=32_768, **arguments):
    limits = dict(gpu_memory_limit=f"{gib}GiB", host_memory_limit="64GiB", link_gbps=None, device_gbps=None)
    return forecaster(shape, max_model_len=context, batch=1, gpu="RTX 4090", **limits, **arguments)


@pytest.mark.parametrize("shape", ALL_ON_GPU)
def test_experts_have_slots_where_weights_have_no_room(shape):
    before = None
    for gib in SIZES:
        step = forecast(shape, gib, **LEAST).step()
        memory = step.memory
        assert step.fits and memory.total_bytes <= gib * GIB, step.problem
        assert memory.max_model_len >= 32_768 and not memory.streamed_bytes, "whole layers are streamed"
        assert (memory.num_expert_slots == 0) == (gib >= ALL_ON_GPU[shape])
        if before is not None:
            assert step.ms_per_token <= before.ms_per_token
            assert memory.num_expert_slots >= before.memory.num_expert_slots or not memory.num_expert_slots
        before = step


@pytest.mark.parametrize("gib", [8, 12])
def test_16_bits_have_slots_too(gib):
    """Where these have no room, layers are streamed one by one, through landing buffers of one each."""
    memory = forecast("lfm2-8b-a1b", gib).step().memory
    assert memory.num_expert_slots and not memory.streamed_bytes
    made = forecast("lfm2-24b-a2b", 4)
    memory, spec = made.step().memory, made.spec
    assert len(spec.piece_bytes) == 1 + len(spec.own_pieces) + len(spec.attention_layers)
    assert memory.streamed_bytes and memory.landing_bytes <= 2 * max(spec.piece_bytes) < 3 * GIB


@pytest.mark.parametrize(
    "shape, count",
    [
        ("lfm2-350m", 354_483_968),
        ("lfm2-700m", 742_489_344),
        ("lfm2-1.2b", 1_170_340_608),
        ("lfm2-2.6b", 2_569_272_320),
    ],
)
def test_shapes_have_as_many_weights_as_the_models_that_they_are_of(shape, count):
    assert forecast(shape, 24).spec.weight_bytes == 2 * count
