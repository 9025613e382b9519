"""How the budget is spent: numbers from the config alone."""

import copy
import json
import pickle
import re
from dataclasses import replace

import pytest
import torch
from described import CPU, GPU, without_proposals
from engines import make_engine, random_prompts
from tiny_models import make_checkpoint, tiny_config

import nanoinfer
from nanoinfer import EngineConfig, SamplingParams
from nanoinfer.common.units import GIB, parse_bytes
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.search import best_plan
from nanoinfer.models.shapes import SHAPES, UNLIMITED, write_shape
from nanoinfer.weights.load import read_checkpoint, read_spec


def spec_of(tmp_path, shape="qwen3-4b", overrides=None):
    if (shape, overrides is UNLIMITED) not in COUNTED:
        found = read_spec(read_checkpoint(write_shape(shape, tmp_path), overrides), torch.bfloat16)
        COUNTED[shape, overrides is UNLIMITED] = found
    return COUNTED[shape, overrides is UNLIMITED]


COUNTED = {}  # a shape is the same each time


def plan(tmp_path, budget_gib, **arguments):
    spec = spec_of(tmp_path, overrides=UNLIMITED)
    config = EngineConfig(model="unused", **arguments)
    return best_plan(
        Planner(config, spec, budget_bytes=int(budget_gib * GIB), host_available_bytes=100 * GIB, device=GPU)
    )


@pytest.mark.parametrize("budget_gib", [9, 10, 12, 16, 24, 40, 80])
@pytest.mark.parametrize("enable_cpu_offload", [False, True])
def test_the_parts_never_add_up_to_more_than_the_budget(tmp_path, budget_gib, enable_cpu_offload):
    arguments = dict(enable_cpu_offload=enable_cpu_offload, max_num_seqs=4, max_model_len=None)
    made = plan(tmp_path, budget_gib, **arguments)
    assert made.fixed_bytes + made.pool_bytes <= made.budget_bytes
    assert made.num_gpu_blocks >= 3 and made.max_model_len >= 256


def test_the_ring_does_not_depend_on_the_context(tmp_path):
    options = dict(enable_cpu_offload=True, max_num_seqs=2, speculative_config=None)
    rings = {plan(tmp_path, 16, max_model_len=length, **options).ring_bytes for length in (40_000, 131_072, 400_000)}
    assert rings == {4 * 32 * 2**20}


def test_a_smaller_budget_takes_smaller_prefill_steps_before_it_refuses(tmp_path):
    sizes = []
    for budget_gib in (16, 9.2, 8.5, 8):
        made = plan(tmp_path, budget_gib, enable_cpu_offload=True, max_num_seqs=1, max_model_len=131_072)
        sizes.append(made.max_num_batched_tokens)
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[-1]
    arguments = dict(enable_cpu_offload=True, max_num_seqs=1, max_model_len=131_072, cpu_offload_gb=0)
    with pytest.raises(ValueError, match="too few by .*: give at least .*. Weights take 7.5") as refusal:
        plan(tmp_path, 7.8, **arguments)
    smallest = float(re.search(r'give at least "([\d.]+)GiB"', str(refusal.value))[1])
    assert plan(tmp_path, smallest, **arguments).num_gpu_blocks == 4
    with pytest.raises(ValueError, match="too few"):
        plan(tmp_path, smallest - 0.011, **arguments)


@pytest.mark.parametrize("arguments", [{}, dict(enable_cpu_offload=True, max_model_len=131_072, max_num_seqs=1)])
def test_a_budget_below_the_weights_streams_as_few_of_them_as_must_be(tmp_path, arguments):
    whole, before = spec_of(tmp_path).weight_bytes, None
    assert plan(tmp_path, 3, **arguments).max_model_len >= 256, "there is not room for a conversation"
    for budget_gib in (4, 5, 6, 7, 16):
        made = plan(tmp_path, budget_gib, **arguments)
        assert made.total_bytes <= budget_gib * GIB and made.streamed_bytes % 1024 == 0
        assert made.weight_bytes + made.streamed_bytes >= whole
        assert made.max_model_len >= 8192
        if budget_gib < 16:
            assert 0 < made.streamed_bytes <= (before or whole) and len(made.streamed_pieces) % 2 == 0
        before = made.streamed_bytes
    assert before == 0 == made.landing_bytes


def test_what_settings_ask_to_stream_is_streamed_and_what_cannot_be_refused(tmp_path):
    spec = spec_of(tmp_path)
    layers = sum(spec.piece_bytes[1:])
    can = layers + spec.head_bytes
    assert plan(tmp_path, 24, cpu_offload_gb=2).streamed_bytes in range(2 * GIB, 2 * GIB + 2 * max(spec.piece_bytes))
    assert plan(tmp_path, 24, resident_weights_limit=0).streamed_bytes == can
    for limit in (3 * GIB, spec.head_bytes, spec.head_bytes - 1):
        made = plan(tmp_path, 24, resident_weights_limit=limit)
        assert made.head_bytes == (spec.head_bytes if limit < spec.head_bytes else 0)
        stays = layers + made.head_bytes - made.streamed_bytes
        assert limit - 2 * max(spec.piece_bytes) < stays <= limit
    layers_alone, some, both = (plan(tmp_path, 24, cpu_offload_gb=n / GIB) for n in (layers, layers + 1, can))
    assert not layers_alone.head_bytes and layers_alone.streamed_bytes == layers
    assert some.head_bytes and layers < some.streamed_bytes < can and both.streamed_bytes == can
    with pytest.raises(ValueError, match=r"cpu_offload_gb=50 is more than the .*, or resident_weights_limit=0"):
        plan(tmp_path, 24, cpu_offload_gb=50)
    with pytest.raises(
        ValueError, match="host_memory_limit='1GiB' is too small for the .* GiB of weights that are streamed"
    ):
        plan(tmp_path, 24, resident_weights_limit=0, host_memory_limit="1GiB")
    with pytest.raises(ValueError, match="is too small beside .* GiB of weights for the KV cache of 131072 tokens"):
        wanted = dict(host_memory_limit=can + 15 * spec.layout.block_bytes, max_model_len=131_072)
        plan(tmp_path, 24, resident_weights_limit=0, enable_cpu_offload=True, **wanted)


@pytest.mark.parametrize("enable_cpu_offload", [False, "auto", True])
def test_streamed_weights_and_kv_share_the_limit_of_host_memory(tmp_path, enable_cpu_offload):
    spec = spec_of(tmp_path)
    streamed = sum(spec.piece_bytes[1:]) + spec.head_bytes
    limit = streamed + 40 * spec.layout.block_bytes + 1000
    given = dict(resident_weights_limit=0, max_num_seqs=4, enable_cpu_offload=enable_cpu_offload)
    made = plan(tmp_path, 24, **given, host_memory_limit=limit)
    assert made.host_weight_bytes == streamed and made.num_host_blocks == 40
    with pytest.raises(ValueError, match="GiB of weights that are streamed from there"):
        plan(tmp_path, 24, **given, host_memory_limit=streamed - 1)


@pytest.mark.parametrize("enable_cpu_offload", [False, "auto", True])
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-30b-a3b"])
@pytest.mark.sampled("qwen3-0.6b-False", "qwen3-0.6b-True", "qwen3-30b-a3b-auto")
def test_a_refusal_names_the_least_memory_that_streamed_weights_need(tmp_path, enable_cpu_offload, shape):
    spec = spec_of(tmp_path, shape)

    def made(gpu, host):
        given = dict(gpu_memory_limit=gpu, host_memory_limit=host, max_num_seqs=4)
        config = EngineConfig(model="unused", enable_cpu_offload=enable_cpu_offload, **given)
        budget = dict(budget_bytes=int(config.gpu_memory_limit), host_available_bytes=100 * GIB)
        return best_plan(Planner(config, spec, device=GPU, **budget))

    with pytest.raises(
        ValueError, match="gpu_memory_limit='200MiB' is too small .*. Weights take .* GiB more are streamed"
    ) as refused:
        made("200MiB", "90GiB")
    least = float(re.search(r'give at least "([\d.]+)GiB"', str(refused.value))[1])
    assert made(f"{least}GiB", "90GiB").streamed_bytes
    with pytest.raises(ValueError, match="too small"):
        made(f"{least - 0.021}GiB", "90GiB")
    host = made(f"{least}GiB", "90GiB").streamed_bytes - max(spec.piece_bytes)
    with pytest.raises(ValueError, match="host_memory_limit=.* is too small for the .* that are streamed") as refused:
        made(f"{least}GiB", host)
    enough, more = re.search(
        r'give at least "([\d.]+)GiB" of host memory, of which .*, or give at least "([\d.]+)GiB" of GPU memory$',
        str(refused.value),
    ).groups()
    assert made(f"{least}GiB", f"{enough}GiB").streamed_bytes and made(f"{more}GiB", host)


def test_a_smaller_step_is_taken_where_the_host_cannot_hold_what_a_larger_one_makes_stream(tmp_path):
    """And more is streamed where KV finds no room on the host, and would on the GPU."""
    wanted = dict(max_model_len=32_768, enable_cpu_offload="auto", cpu_offload_gb=1.5, max_num_batched_tokens=2048)
    config, spec = EngineConfig(model="unused", **wanted), spec_of(tmp_path, "qwen3-8b")
    made = best_plan(Planner(config, spec, budget_bytes=16 * GIB, host_available_bytes=8 * GIB, device=GPU))
    assert made.streamed_bytes and (made.num_gpu_blocks - 1) * 256 >= 32_768
    config = EngineConfig(model="unused")
    sizes = [
        best_plan(
            Planner(config, spec, budget_bytes=12 * GIB, host_available_bytes=host, device=GPU)
        ).max_num_batched_tokens
        for host in (9 * GIB, 5 * GIB)
    ]
    assert sizes[0] > sizes[1]


def test_on_the_cpu_streamed_weights_count_beside_those_that_stay(tmp_path):
    spec = spec_of(tmp_path, "qwen3-8b")

    def made(gib):
        budget = dict(budget_bytes=int(0.4 * gib * GIB), host_available_bytes=gib * GIB)
        return best_plan(Planner(EngineConfig(model="unused"), spec, device=CPU, **budget))

    assert made(20).streamed_bytes
    with pytest.raises(ValueError, match="GiB of host memory are available, too few for the .* GiB of weights that"):
        made(16)


def test_an_override_below_the_smallest_useful_pool_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="num_gpu_blocks_override=3 is too small: 35 KV blocks of 256 tokens"):
        plan(tmp_path, 12, enable_cpu_offload=True, num_gpu_blocks_override=3, max_num_batched_tokens=8192)


def test_offload_holds_contexts_that_resident_mode_refuses(tmp_path):
    with pytest.raises(ValueError, match=r'too few by 6.84 GiB: give at least "18.84GiB" of GPU memory. Weights'):
        plan(tmp_path, 12, max_num_seqs=1, max_model_len=131_072)
    assert plan(tmp_path, 12, enable_cpu_offload=True, max_num_seqs=1, max_model_len=131_072).max_model_len == 131_072


def test_an_open_max_model_len_is_cut_to_what_one_sequence_can_have(tmp_path):
    made = plan(tmp_path, 12)
    assert made.max_model_len == (made.num_gpu_blocks - 1) * 256


def test_the_plan_in_one_line_names_every_part(tmp_path):
    line = plan(tmp_path, 12, enable_cpu_offload=True).one_line("offload")
    for word in ("of 12.00 GiB of GPU memory", "weights 7.", "KV cache ", "ring 0.12", "working memory ",
                 " GiB. Prefill", "(max_model_len), all weights on the GPU. ", "tokens, offload mode"):  # fmt: skip
        assert word in line
    assert line.startswith("contexts of up to ")
    streamed = plan(tmp_path, 6, enable_cpu_offload=True)
    begin = f"{streamed.streamed_bytes / 2**30:.2f} GiB of weights stream in each step: nanoinfer plan says"
    assert streamed.one_line("offload").startswith(begin)


def test_on_the_cpu_the_line_says_what_is_held_and_that_the_rest_is_taken_as_needed(tmp_path):
    path = make_checkpoint("qwen3", tmp_path, num_layers=2)
    engine = make_engine(path)
    made = engine.plan
    rest = made.total_bytes - made.weight_bytes + made.host_bytes
    held = made.weight_bytes / 2**20
    assert engine.plan.one_line("resident") == (
        f"contexts of up to {made.max_model_len:,} tokens (max_model_len). Weights take {held:.2f} MiB, requests up to "
        f"{rest / 2**20:.2f} MiB more: gpu_memory_limit and host_memory_limit lower that. Prefill steps of "
        f"{made.max_num_batched_tokens:,} tokens, resident mode"
    )
    engine.close()


def test_the_pool_has_as_many_blocks_as_the_plan_and_a_longest_request_runs(tmp_path):
    path = make_checkpoint("qwen3", tmp_path, num_layers=2, max_position_embeddings=768)
    engine = make_engine(path, gpu_memory_limit="2MiB", max_model_len=None, max_num_seqs=2, enable_cpu_offload=True)
    made = engine.plan
    assert engine.runner.gpu_kv.shape[1] == made.num_gpu_blocks
    assert made.fixed_bytes + made.pool_bytes <= 3 * 2**20
    longest = made.max_model_len - 2
    request = engine.add_request("r", random_prompts(1, longest, longest)[0], SamplingParams(max_tokens=2))
    while not request.is_finished:
        engine.step()


@pytest.mark.parametrize(
    "text, size", [("12GiB", 12 * 2**30), ("500MB", 500 * 10**6), ("1.5k", 1536), (" 7 gib ", 7 * 2**30), (123, 123)]
)
def test_sizes_are_read_as_written(text, size):
    assert parse_bytes(text, "limit") == size


def test_a_config_holds_numbers_that_are_shown_as_they_were_given():
    given = dict(host_memory_limit="12GiB", ring_slot_bytes="1.5k", gpu_memory_limit=2e9, resident_kv_limit=0)
    config = EngineConfig(model="unused", **given)
    wanted = dict(host_memory_limit=12 * GIB, ring_slot_bytes=1536, gpu_memory_limit=2 * 10**9, resident_kv_limit=0)
    for one in (config, replace(config, seed=1), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        for name, size in wanted.items():
            value = getattr(one, name)
            assert isinstance(value, int) and value == size and f"{value!r} {value}" == f"{given[name]!r} {given[name]}"
    assert replace(config, host_memory_limit=config.host_memory_limit + 1).host_memory_limit == 12 * GIB + 1
    assert type(EngineConfig(model="unused", gpu_memory_limit=0.5).gpu_memory_limit) is float  # a share
    assert json.dumps(config.host_memory_limit) == str(12 * 2**30)


def test_graph_batch_sizes_follow_the_rules():
    config = EngineConfig(model="unused")
    assert config.graph_batch_sizes(1, GPU) == [1]
    assert config.graph_batch_sizes(5, GPU) == [1, 2, 4, 8]
    assert config.graph_batch_sizes(600, GPU) == [1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256]
    staged = EngineConfig(model="unused", cuda_graph_batch_sizes="staged").graph_batch_sizes(600, GPU)
    assert staged == [1, 2, 4, 8, *range(16, 257, 16), 512, 768]
    assert EngineConfig(model="unused", cuda_graph_batch_sizes=[4, 2, 4]).graph_batch_sizes(9, GPU) == [2, 4]


def test_weight_bytes_of_known_shapes(tmp_path):
    """And limits, from the models' cards: 4.02 billion parameters with tied embeddings, 8.19 without."""
    expected = {
        "qwen3-0.6b": (0.596, 40_960),
        "qwen3-4b": (4.022, 40_960),
        "qwen3-14b": (14.768, 40_960),
        "qwen3-32b": (32.762, 40_960),
        "llama3.2-1b": (1.236, 131_072),
        "llama3.2-3b": (3.213, 131_072),
        "smollm3-3b": (3.075, 65_536),
        "phi-4": (14.660, 16_384),
        "mistral-small-24b": (23.572, 32_768),
        "qwen2.5-7b": (7.616, 32_768),
        "qwen2.5-14b": (14.770, 32_768),
        "qwen2.5-32b": (32.764, 32_768),
        "gemma3-1b": (1.000, 32_768),
        "gemma3-4b": (3.880, 131_072),
        "gemma3-12b": (11.766, 131_072),
        "gemma3-27b": (27.009, 131_072),
        "granite-3.3-8b": (8.171, 131_072),
        "granite-4-micro": (3.403, 131_072),
        "olmo2-7b": (7.299, 4096),
        "olmo2-13b": (13.716, 4096),
        "glm-4-9b": (9.400, 131_072),
        "glm-4-32b": (32.566, 32_768),
        "exaone-4-32b": (32.003, 131_072),
        "seed-oss-36b": (36.151, 524_288),
        "ernie-4.5-0.3b": (0.361, 131_072),
        "nemotron-mini-4b": (4.191, 4096),
        "starcoder2-7b": (7.174, 16_384),
        "starcoder2-15b": (15.958, 16_384),
        "qwen3-30b-a3b": (30.532, 40_960),
        "qwen3-coder-30b-a3b": (30.532, 262_144),
        "glm-4.5-air": (106.852, 131_072),
        "mixtral-8x7b": (46.703, 32_768),
        "olmoe-7b": (6.919, 4096),
        "qwen3-8b": (8.191, 40_960),
        "llama3.1-8b": (8.030, 131_072),
    }
    for shape, (billions, limit) in expected.items():
        spec = spec_of(tmp_path, shape)
        assert spec.weight_bytes / 2e9 == pytest.approx(billions, abs=0.001), shape
        assert spec.max_position == limit, shape
    assert set(expected) < set(SHAPES)
    assert spec.embedding_bytes == 2 * spec.vocab_size * 4096
    assert tiny_config("qwen3").vocab_size == 160


def test_rows_that_share_a_long_document_have_room_for_their_splits_together(tmp_path):
    """Each attends to the whole of it: 16 rows of 257 blocks over a pool of 800."""
    arguments = dict(enable_cpu_offload=True, max_model_len=65_648, max_num_seqs=16, host_memory_limit=30 * GIB)
    arguments |= dict(speculative_config=None)  # rows of drafts have splits, too
    made = plan(tmp_path, 24, **arguments)
    assert made.num_host_blocks < 900 and made.max_splits == 16 * 257
    many = plan(tmp_path, 24, **arguments | dict(max_num_seqs=200))
    assert 16 * 257 < many.max_splits < 200 * 257
    assert many.max_splits * many.split_bytes <= 0.0101 * many.budget_bytes


def test_a_smaller_prefill_step_is_taken_where_less_streams_then(monkeypatch):
    without_proposals(monkeypatch)
    given = dict(host_memory="64GiB", gpu_memory="14.5GiB", cpu_offload_gb=0, batch=1)
    short, long, longest, asked = (
        nanoinfer.plan("gpt-oss-20b", context=context, **given | more)
        for context, more in ((8192, {}), (65536, {}), (131072, {}), (65536, dict(max_num_batched_tokens=8192)))
    )
    steps = [one.memory.max_num_batched_tokens for one in (short, asked, long, longest)]
    assert steps[0] == steps[1] == 8192 > max(steps[2:])
    assert not short.streamed_bytes_per_step and long.ms_per_token < asked.ms_per_token / 2
