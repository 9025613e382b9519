"""When the plan puts experts into slots: where whole layers would stream, or much KV, and never at a larger price."""

import pytest
from described import GPU

import nanoinfer
from nanoinfer.config import EngineConfig
from nanoinfer.devices.base import Device
from nanoinfer.memory.limits import TooSmall
from nanoinfer.memory.measure import Measure
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.rates import Rates
from nanoinfer.memory.search import CLOSE, best_plan
from nanoinfer.memory.setup import Specs
from nanoinfer.memory.streamed import missed_bytes
from nanoinfer.step.memory_plan import MemoryPlan

GIB = 2**30
INT4 = dict(quantization="int4", head_quantization="int8")
ASKED = dict(max_model_len=32768, max_num_seqs=1, enable_cpu_offload=True)


@pytest.fixture
def plan(specs_of):
    def make(shape: str, gib: float, host: int = 64, *, device: Device = GPU, may_pin: bool = True, **arguments):
        config = EngineConfig(model="unused", **arguments)
        sizes = dict(budget_bytes=int(gib * GIB), host_available_bytes=host * GIB, device=device, may_pin=may_pin)
        found = best_plan(Planner(config, specs_of(shape).of(config), **sizes))
        assert found.total_bytes <= found.budget_bytes
        assert found.host_weight_bytes + found.host_bytes <= host * GIB
        return found

    return make


def cost(specs: Specs, found: MemoryPlan, **arguments) -> float:
    config = EngineConfig(model="unused", **arguments)
    return Measure(config, specs.of(config), Rates()).seconds(found, arguments["max_num_seqs"])


@pytest.mark.parametrize("gib", [6, 8, 10.5, 14.5])
def test_small_cards_have_slots_where_layers_or_kv_would_stream(plan, specs_of, gib):
    """Without pinned memory there are no slots: what would be without this choice."""
    found, before = (plan("qwen3-30b-a3b", gib, **INT4, **ASKED, may_pin=may_pin) for may_pin in (True, False))
    assert found.num_expert_slots >= 8 and not found.streamed_pieces and before.num_expert_slots == 0
    ours, theirs = (cost(specs_of("qwen3-30b-a3b"), one, **INT4, **ASKED) for one in (found, before))
    # Within 6 GiB all of the KV has room beside a small step: less passes so than with a large one and KV that streams.
    assert ours < theirs / 2 and found.max_num_batched_tokens >= (512 if gib == 6 else 4096)


def test_more_memory_means_more_slots_until_all_fits(plan):
    counts = [plan("qwen3-30b-a3b", gib, **INT4, max_model_len=8192, max_num_seqs=1) for gib in (6, 8, 10, 12, 24)]
    slots = [one.num_expert_slots for one in counts]
    assert slots[:-1] == sorted(slots[:-1]) and slots[0] >= 8 and slots[-1] == 0
    assert counts[-1].host_weight_bytes == 0


@pytest.mark.parametrize(
    "shape, gib, arguments",
    [
        ("glm-4.5-air", 16, INT4), ("glm-4.5-air", 17, INT4 | dict(max_num_seqs=16)), ("qwen3-30b-a3b", 4.5, INT4),
        ("qwen3-30b-a3b", 6, INT4), ("gpt-oss-20b", 7, {}),
    ],
)  # fmt: skip
def test_a_conversation_has_room_where_it_had(plan, shape, gib, arguments):
    found, before = (plan(shape, gib, 96, **arguments, may_pin=may_pin) for may_pin in (True, False))
    assert found.max_model_len >= min(8192, before.max_model_len)
    assert found.max_num_batched_tokens >= before.max_num_batched_tokens / 4


@pytest.mark.parametrize(
    "shape, gib, host, rows",
    [("qwen3-30b-a3b", 48, 64, 16), ("qwen3-30b-a3b", 48, 96, 64), ("mixtral-8x7b", 64, 96, 16)],
)
def test_experts_do_not_take_the_host_memory_of_kv_that_is_asked_for(plan, shape, gib, host, rows):
    asked = dict(max_model_len=8192, max_num_seqs=rows, enable_cpu_offload=True)
    found, before = (plan(shape, gib, host, **asked, may_pin=may_pin) for may_pin in (True, False))
    assert found.num_host_blocks >= min(before.num_host_blocks, rows * 8192 // 256)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("offload", [False, True, "auto"])
@pytest.mark.parametrize("shape, gib", [("qwen3-30b-a3b", 4), ("mixtral-8x7b", 16), ("gpt-oss-20b", 8)])
def test_no_plan_costs_more_than_it_would_without_slots(plan, specs_of, shape, gib, offload, rows):
    quantised = {} if shape.startswith("gpt") else INT4
    asked = quantised | dict(max_model_len=8192, max_num_seqs=rows, enable_cpu_offload=offload)
    found, before = (plan(shape, gib, **asked, may_pin=may_pin) for may_pin in (True, False))
    assert cost(specs_of(shape), found, **asked) <= CLOSE * cost(specs_of(shape), before, **asked)


def test_nobody_else_has_slots(plan):
    for options in (dict(resident_weights_limit="1GiB"), dict(cpu_offload_gb=10)):
        assert plan("qwen3-30b-a3b", 8, **INT4, **options, max_model_len=2048).num_expert_slots == 0
    assert plan("qwen3-8b", 4, **INT4, max_model_len=2048).num_expert_slots == 0
    assert plan("qwen3-30b-a3b", 24, **INT4, max_model_len=2048).num_expert_slots == 0
    with pytest.raises(TooSmall):
        plan("qwen3-30b-a3b", 8, **INT4, cpu_offload_gb=0)


def test_what_is_missed_follows_from_the_share_that_is_found(plan, specs_of):
    found = plan("qwen3-30b-a3b", 8, **INT4, expert_slots=32, max_model_len=2048)
    spec = specs_of("qwen3-30b-a3b").of(EngineConfig(model="unused", **INT4))
    chosen = spec.sparse.expert_bytes * 8 / 128
    assert missed_bytes(spec, found, 1) == pytest.approx(chosen * 3 / 4) == missed_bytes(spec, found, 1, 0.25)
    assert missed_bytes(spec, found, 1, 1.0) == 0 and found.expert_bytes == spec.sparse.expert_bytes


@pytest.mark.parametrize("slots", [64, 128])
def test_a_refusal_names_the_slots_that_were_asked_for(plan, slots):
    with pytest.raises(TooSmall, match=rf"of GPU memory\. .* for {slots} experts of each layer"):
        plan("qwen3-30b-a3b", 8, **INT4, expert_slots=slots)
    given = dict(gpu_memory_limit="8GiB", host_memory_limit="64GiB", max_model_len=2048, expert_slots=slots)
    first = nanoinfer.plan("qwen3-30b-a3b", **INT4, **given).proposals[0]
    assert first.changes == {"expert_slots": None} and first.what.startswith("as many experts on the GPU as")
    assert "--expert-slots" not in first.command
