"""What an engine chooses for itself, against all that can be asked of it: nothing else is done much sooner."""

import random
from dataclasses import replace
from itertools import product

import pytest
from described import CPU, GPU

from nanoinfer.config import EngineConfig
from nanoinfer.memory import forecaster
from nanoinfer.memory.cards import CARDS, card_named
from nanoinfer.memory.forecaster import plan as forecast
from nanoinfer.memory.measure import Measure
from nanoinfer.memory.planner import Planner
from nanoinfer.memory.rates import Rates
from nanoinfer.memory.search import best_plan
from nanoinfer.models.shapes import SHAPES

GIB = 2**30
WITHIN = 1.1
INT4 = dict(quantization="int4")
STEPS = (8192, 4096, 2048, 1024, 512, 256)
DIFFERENT = {(card.called_gb, card.link_gbps, round(card.device_gbps, -2)): card.name for card in CARDS}


def makes(card: str, host: float, spec, gib: float | None = None):
    """Return what makes the plan of a config, or None; and what prices it."""
    given = card_named(card)
    budget = given.memory_bytes if gib is None else int(gib * GIB)
    sizes = dict(budget_bytes=budget, host_available_bytes=int(host * GIB), device=GPU, rates=Rates.of_card(given))

    def make(config: EngineConfig):
        try:
            return best_plan(Planner(config, spec, **sizes))
        except ValueError:
            return None

    return make, lambda config, plan: Measure(config, spec, Rates.of_card(given)).seconds(plan, plan.max_num_seqs)


def settings(spec, finely: bool):
    """Yield settings that choose for the engine: steps; slots, or weights that stream; and where KV is."""
    shares = [0, 0.1, 0.25, 0.5, 0.75, 0.9] if finely else [0, 0.3, 0.7]
    weights = [
        {},
        dict(cpu_offload_gb=0),
        *(dict(resident_weights_limit=int(one * spec.weight_bytes)) for one in shares),
    ]
    if spec.sparse is not None:
        low, high = spec.sparse.num_chosen, spec.sparse.num_experts
        counts = {round(low * (high / low) ** (place / 8)) for place in range(9)}
        weights += [dict(expert_slots=count) for count in sorted(counts)]
    for tokens, one in product(STEPS, weights):
        captured = GPU.graph_num_tokens(tokens // 4)  # as where the engine chooses this step
        yield dict(max_num_batched_tokens=tokens, capture_num_tokens=captured) | one
    for gib in (0, 0.5, 2) if finely else (0.5,):
        yield dict(resident_kv_limit=int(gib * GIB))


def check(config: EngineConfig, spec, card: str, host: float, gib: float | None = None, finely: bool = False) -> bool:
    """Return whether anything fits; whatever fits is not much better than what is chosen."""
    make, price = makes(card, host, spec, gib)
    chosen = make(config)
    if chosen is None:
        assert not any(make(replace(config, **one)) for one in settings(spec, finely))
        return False
    least = price(config, chosen) / WITHIN
    for one in settings(spec, finely):
        asked = replace(config, **one)
        other = make(asked)
        assert other is None or price(asked, other) >= least, (one, least * WITHIN, price(asked, other), chosen, other)
    return True


def config_of(formats: dict, offload, count: int | None, **arguments) -> EngineConfig:
    """Without drafts, whose rows are no sequences."""
    given = dict(speculative_config=None) | formats | arguments
    return EngineConfig(model="unused", enable_cpu_offload=offload, max_num_seqs=count, **given)


CASES = (
    ("gpt-oss-20b", {}, "RTX 3060", 26, "auto", None),
    ("gpt-oss-20b", {}, "RTX 3060", 120, "auto", 1),
    ("qwen3-30b-a3b", INT4, "RTX 3060", 64, "auto", None),
    ("qwen3-30b-a3b", INT4, "RTX 4060", 32, False, 4),
    ("gpt-oss-120b", {}, "RTX 3090", 120, "auto", None),
    ("gpt-oss-120b", {}, "RTX 3090", 60, "auto", 1),
    ("glm-4.5-air", INT4, "RTX 3090", 58, "auto", 1),
    ("qwen3-8b", INT4, "RTX 4070", 64, "auto", 1),
    ("qwen3-8b", INT4, "RTX 4060", 32, True, 4),
    ("qwen3-14b", {}, "RTX 5080", 64, False, None),
    ("qwen3-4b", {}, "RTX 4070", 16, "auto", None),
    ("gemma3-12b", INT4, "RTX 3080 10GB", 32, "auto", 4),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (case[0], *case[2:]))))
def test_nothing_that_can_be_asked_for_is_much_better_than_what_is_chosen(case, specs_of):
    """By default: `serve` and `LLM` run as many sequences as there are, `chat` and `generate` one."""
    shape, formats, card, host, offload, count = case
    config = config_of(formats, offload, count)
    assert check(config, specs_of(shape).of(config), card, host)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (case[0], *case[2:]))))
def test_drafts_that_nobody_asked_for_cost_next_to_nothing(case, specs_of):
    shape, formats, card, host, offload, count = case
    config = config_of(formats, offload, count)
    spec = specs_of(shape).of(config)
    make, _ = makes(card, host, spec)
    without, plan = make(config), make(replace(config, speculative_config="auto"))
    for name in ("streamed_bytes", "num_expert_slots", "max_num_batched_tokens", "max_running", "max_model_len"):
        assert getattr(plan, name) == getattr(without, name), name
    if count is None:  # there are rows for as many sequences, and few run
        assert (plan.num_lines > 0) == (offload is not False or without.passing_bytes > 0)
        assert replace(plan, num_lines=0) == without
    measure = Measure(config, spec, Rates.of_card(card_named(card)))
    steps = [measure.step_seconds(one, 1, min(measure.context, one.max_model_len)) for one in (plan, without)]
    of_ring = (plan.ring_bytes - without.ring_bytes) // plan.block_bytes
    assert without.num_gpu_blocks - plan.num_gpu_blocks <= 4 + of_ring and steps[0] <= 1.01 * steps[1]


@pytest.mark.parametrize(
    "options, num_slots",
    [
        (dict(enable_cpu_offload=True, speculative_config=dict(method="suffix")), 16),
        (dict(enable_cpu_offload=True), 16),
        (dict(enable_cpu_offload=True, speculative_config=None), 4),
        (dict(enable_cpu_offload=True, num_ring_slots=5), 5),
        (dict(enable_cpu_offload=True, ring_slot_bytes="8MiB"), 4),
        (dict(enable_cpu_offload="auto"), 4),
    ],
)
def test_where_steps_wait_for_drafts_the_ring_fills_meanwhile(options, num_slots, specs_of):
    limits = dict(max_model_len=32768, host_memory_limit="32GiB", resident_kv_limit=0)
    limits |= {} if options["enable_cpu_offload"] is True else dict(resident_kv_limit=None)
    config = replace(config_of({}, True, 1, **limits), **(dict(speculative_config="auto") | options))
    make, _ = makes("RTX 3090", 32, specs_of("qwen3-4b").of(config))
    plan = make(config)
    assert plan.num_ring_slots == num_slots
    assert plan.ring_bytes == num_slots * plan.blocks_per_slot * plan.block_bytes // 36


def test_drafts_that_nobody_asked_for_leave_room_for_all_that_are_to_run(specs_of):
    """Here they would leave 3.97 of four sequences on the GPU, and the host has no room for the rest."""
    arguments = dict(max_model_len=8192, host_memory_limit="15.4GiB")
    config = config_of({}, "auto", 4, **arguments)
    spec = specs_of("qwen3.5-9b").of(config)
    make, _ = makes("RTX 4060", 15.4, spec)
    measure = Measure(config, spec, Rates.of_card(card_named("RTX 4060")))
    assert all(measure.holds_all(make(replace(config, speculative_config=one))) for one in (None, "auto"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (case[0], *case[2:]))))
def test_drafts_that_are_asked_for_are_no_sequences(case, specs_of):
    """One sequence's plan has rows for what it guesses, and else what it has without: slots for experts above all."""
    shape, formats, card, host, offload, _ = case
    config = config_of(formats, offload, 1)
    spec = specs_of(shape).of(config)
    make, _ = makes(card, host, spec)
    without, plan = make(config), make(replace(config, speculative_config=dict(method="suffix")))
    measure = Measure(config, spec, Rates.of_card(card_named(card)))
    steps = [measure.step_seconds(one, 1, min(measure.context, one.max_model_len)) for one in (plan, without)]
    assert plan.num_lines == 9 and plan.max_running == 1 and steps[0] <= WITHIN * steps[1]
    assert plan.num_expert_slots >= 0.9 * without.num_expert_slots


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.sampled()
def test_nor_of_any_shape_on_any_card(shape, specs_of):
    drawn, fitting = random.Random(shape), 0
    given = list(product((16, 32, 64, 128), (1, 4, 64), (False, "auto", True)))
    for formats, card in product(({}, INT4)[: 1 if shape.startswith("gpt-oss") else 2], DIFFERENT.values()):
        for host, count, offload in drawn.sample(given, 6):
            config = config_of(formats, offload, count)
            fitting += check(config, specs_of(shape).of(config), card, host)
    assert fitting


@pytest.mark.parametrize(
    "shape, gib, formats", [("gpt-oss-20b", 11, {}), ("gpt-oss-120b", 22, {}), ("qwen3-30b-a3b", 8, INT4)]
)
@pytest.mark.parametrize("host", [96, 256])
def test_a_server_without_other_options_has_slots_where_experts_fit_in_them(shape, gib, formats, host, specs_of):
    config = EngineConfig(model="unused", enable_cpu_offload="auto", **formats)
    make, _ = makes("H200", host, specs_of(shape).of(config), gib)
    found = make(config)
    assert found.num_expert_slots and not found.streamed_pieces and found.max_model_len >= 32_768


def test_a_prefill_step_that_costs_decode_time_is_not_taken(specs_of):
    """Of 8,192 tokens it left so little room for KV that a token took three times as long."""
    config = EngineConfig(model="unused", enable_cpu_offload="auto", max_num_seqs=1, max_model_len=32_768, **INT4)
    spec = specs_of("qwen3-8b").of(config)
    make, _ = makes("RTX 4070", 64, spec)
    measure = Measure(config, spec, Rates.of_card(card_named("RTX 4070")))
    least = min(
        measure.step_seconds(found, 1, 32_768)
        for tokens in STEPS
        if (found := make(replace(config, max_num_batched_tokens=tokens))) is not None
    )
    assert measure.step_seconds(make(config), 1, 32_768) < 1.1 * least < 0.025


@pytest.mark.parametrize(
    "shape, card, gib, count", [("gpt-oss-20b", "RTX 3060", 10.5, 1), ("qwen3-8b", "RTX 4070", 9, 3)]
)
def test_the_measure_has_the_time_of_a_step_that_the_forecast_has(shape, card, gib, count, specs_of):
    given = dict(max_model_len=8192, enable_cpu_offload=True)
    found = forecast(shape, gpu=card, gpu_memory_limit=f"{gib}GiB", host_memory_limit="64GiB", batch=count, **given)
    config = EngineConfig(model="unused", max_num_seqs=count, **given)
    measure = Measure(config, specs_of(shape).of(config), Rates.of_card(card_named(card)))
    assert 1e3 * measure.step_seconds(found.memory, count, 8192) == pytest.approx(found.ms_per_token, rel=1e-6)
    assert found.streamed_bytes_per_step


def test_rates_are_those_of_the_card_that_a_driver_names_or_a_ratio(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda *_: (0, 80 * GIB))
    for name, card in (("NVIDIA H100 80GB HBM3", "H100 80GB"), ("NVIDIA GeForce RTX 4070", "RTX 4070")):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda *_, name=name: name)
        assert Rates.of(GPU) == Rates.of_card(card_named(card))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "Something new")
    assert Rates.of(GPU) == Rates() and Rates.of(CPU).device < Rates().device


def forecast_of(shape: str, gpu: str, host: str, **arguments):
    limits = dict(gpu_memory_limit=gpu, host_memory_limit=host, link_gbps=None, device_gbps=None)
    return forecaster.forecaster(shape, gpu=None, **limits, **arguments)


def test_what_holds_fewer_tokens_than_are_planned_for_says_so():
    made = forecast_of("qwen3-32b", "7.1GiB", "32GiB", batch=1, max_model_len=None)
    assert made.step().context == 32_768 and not made.step().fits
    proposals = {one.what: one for one in made.proposer().to_fit()}
    assert "weights in int8" not in proposals
    tokens = next(
        one.changes["max_model_len"] for what, one in proposals.items() if what.startswith("weights in int8, at")
    )
    assert 16_384 < tokens < 32_768


def test_what_fits_has_room_for_all_that_a_window_sees_on_the_way():
    """More blocks than at the very end, and beside others what steps take: nobody is let in without them."""
    context, given = 131_072, INT4 | dict(max_model_len=131_072, cpu_offload_gb=0)
    spec = forecast_of("gemma3-12b", "12GiB", "32GiB", batch=1, **given).spec

    def step(num_blocks: int, batch: int, tokens: int | None = 4096):
        host = num_blocks * spec.layout.block_bytes
        made = forecast_of("gemma3-12b", "12GiB", host, batch=batch, max_num_batched_tokens=tokens, **given)
        return made.step(context)

    assert spec.kv_groups.most_full(context) > spec.kv_groups.num_full(context)
    for batch in (1, 6):
        most = batch * spec.kv_groups.most_full(context)
        reserve = step(2 * most, batch).memory.step_reserve.on_host_beside(context, batch, 2 * most)
        assert (reserve > 0) == (batch > 1)
        assert [step(most + reserve + more, batch).fits for more in (-1, 0)] == [False, True]
    smaller = step(most + reserve - 1, batch, None)
    assert smaller.fits and smaller.memory.max_num_batched_tokens < 4096
