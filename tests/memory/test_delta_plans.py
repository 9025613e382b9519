"""Plans of Qwen3.5, 3.6 and Next: states beside little KV, what small cards run, and what YaRN adds."""

import pytest

from nanoinfer.memory.forecaster import forecaster

GIB, KIB = 2**30, 2**10
LEAST = dict(quantization="int4", head_quantization="int8")
YARN = dict(rope_type="yarn", rope_theta=1e7, partial_rotary_factor=0.25, factor=4.0)
YARN |= dict(original_max_position_embeddings=262_144)
LONG = dict(rope_parameters=YARN)


def forecast(shape, gib, context=None, batch=None, **arguments):
    limits = dict(gpu_memory_limit=f"{gib}GiB", host_memory_limit="64GiB", link_gbps=None, device_gbps=None, gpu=None)
    return forecaster(shape, max_model_len=context, batch=batch, **limits, **arguments)


@pytest.mark.parametrize(
    "shape, megabytes, kib",
    [
        ("qwen3.5-9b", 50.3, 32),
        ("qwen3.6-27b", 151.0, 64),
        ("qwen3.6-35b-a3b", 62.9, 20),
        ("qwen3-coder-next", 75.5, 24),
    ],
)
def test_a_row_takes_states_of_one_size_and_kv_in_every_fourth_layer(shape, megabytes, kib):
    spec = forecast(shape, 24, 4096, 1, **LEAST).spec
    inputs = sum(1 for state in spec.layers if hasattr(state, "tensors")) * 3 * 2 * 12288  # of the convolutions, about
    assert megabytes * 1e6 <= spec.state_bytes <= megabytes * 1e6 + inputs
    assert spec.kv_bytes(4096) == 4096 * kib * KIB and len(spec.kv_layers) == len(spec.layers) // 4


@pytest.mark.parametrize(
    "shape, gib, context, most",
    [
        ("qwen3.5-9b", 8, 32_768, None),
        ("qwen3.5-9b", 12, 262_144, None),
        ("qwen3.6-27b", 16, 8192, None),
        ("qwen3.6-27b", 24, 131_072, None),
        ("qwen3.6-35b-a3b", 8, 32_768, None),
        ("qwen3.6-35b-a3b", 12, 262_144, None),
        ("qwen3.6-35b-a3b", 24, 1_048_576, LONG),
        ("qwen3-coder-next", 8, 32_768, None),
        ("qwen3-coder-next", 16, 262_144, None),
    ],
)
def test_what_cards_run_with_few_bits(shape, gib, context, most):
    overrides = {} if most is None else dict(hf_overrides=most)
    step = forecast(shape, gib, context, 1, **LEAST, **overrides).step()
    assert step.fits and step.memory.total_bytes <= gib * GIB, step.problem
    assert step.memory.max_model_len >= context
    is_sparse = shape.endswith(("a3b", "next"))
    assert is_sparse or not step.memory.streamed_bytes, "weights are streamed, which have room"
    assert (step.memory.num_expert_slots > 0) == is_sparse


@pytest.mark.parametrize(
    "shape, gib, slots",
    [("qwen3.6-27b", 8, 4), ("qwen3.6-27b", 24, 10), ("qwen3.6-35b-a3b", 8, 8), ("lfm2-1.2b", 8, 64)],
)
def test_states_take_a_small_share_of_a_card_unless_more_are_asked_for(shape, gib, slots):
    """Of 64 sequences they would be most of a small card."""
    assert forecast(shape, gib, 4096, **LEAST).step().memory.num_state_slots == slots
    assert forecast(shape, gib, 4096, **LEAST, state_slots=2).step().memory.num_state_slots == 2
    assert forecast(shape, gib, 4096, **LEAST, max_num_seqs=3).step().memory.num_state_slots == 3


@pytest.mark.parametrize("shape, gib, most", [("qwen3.6-27b", 24, 10), ("qwen3.5-9b", 8, 10), ("lfm2-1.2b", 8, 64)])
def test_states_of_drafts_lie_in_the_same_share(shape, gib, most):
    drafts = LEAST | dict(speculative_config=dict(method="suffix", num_speculative_tokens=8))
    of_many, of_one, plain = (
        forecast(shape, gib, 4096, **options).step().memory
        for options in (drafts, drafts | dict(max_num_seqs=1), LEAST | dict(max_num_seqs=1, speculative_config=None))
    )
    assert (of_many.max_running, of_many.num_slots) == (most, most)
    assert (of_one.max_running, of_one.num_slots, plain.num_slots) == (1, min(9, most), 1)
    states = (of_one.num_slots - 1) * forecast(shape, gib, 4096, **LEAST).spec.state_bytes
    assert states <= of_one.workspace_bytes - plain.workspace_bytes < states + 2**25
