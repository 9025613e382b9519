"""The ring streams bytes: weights pass through it beside KV blocks, in one order on one link."""

from dataclasses import dataclass, field

import pytest
import torch
from engines import LAYER_BLOCK_BYTES, SMALL, assert_pools_as_before, make_engine, random_prompts, run, some_params
from simulated import SimulatedRuntime
from tiny_models import make_checkpoint

from offload import StreamPlan

OFFLOAD = dict(enable_cpu_offload=True, resident_kv_limit=0, num_ring_slots=3, ring_slot_bytes=4 * LAYER_BLOCK_BYTES)


@dataclass(frozen=True)
class WeightOfLayer:
    """A `Transfer`: the down projection of one layer, from host memory."""

    layer: int
    source: torch.Tensor = field(compare=False)
    host_blocks = ()

    def num_bytes(self, layout):
        return len(self.source)

    def copies(self, slot, host):
        return [(slot[: len(self.source)], {self.layer: self.source})]


class StreamedWeights:
    """All layers share one device buffer for their down projections, which the ring fills layer after layer."""

    def __init__(self, engine):
        projections = [layer.mlp.down_proj for layer in engine.runner.model.layers]
        weights = [projection.weight for projection in projections]
        self.transfers = [
            WeightOfLayer(i, w.detach().clone().view(-1).view(torch.uint8)) for i, w in enumerate(weights)
        ]
        self.buffer = torch.nn.Parameter(torch.full(weights[0].shape, torch.nan), requires_grad=False)
        for projection in projections:
            projection.weight = self.buffer
        self.engine = engine.runner.offload
        self.run, self.engine.run = self.engine.run, self

    def __call__(self, step, *arguments):
        self.run(StepWithWeights(step, self), *arguments)

    def beside(self, plan):
        chunks = zip(plan.chunks, self.transfers, strict=True)
        return StreamPlan(tuple([*layer, transfer] for layer, transfer in chunks))


class StepWithWeights:
    """An `OffloadStep`: another one, and the weights that it needs."""

    def __init__(self, step, weights):
        self.step, self.weights, self.write_through = step, weights, step.write_through
        self.plan = weights.beside(step.plan)
        self.ahead = None if step.ahead is None else weights.beside(step.ahead)
        self.compute, self.is_one_graph = step.compute, False

    def attend(self, layer, transfer, ring_slot):
        if not isinstance(transfer, WeightOfLayer):
            return self.step.attend(layer, transfer, ring_slot)
        streamed = self.weights.engine.ring.bytes[ring_slot][: len(transfer.source)]
        self.weights.engine.compute.copy(self.weights.buffer.view(-1).view(torch.uint8), streamed)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), **SMALL)


@pytest.mark.parametrize("seed", [None, *range(5)])
@pytest.mark.sampled("None", "0", "3")
def test_streamed_weights_change_no_bit(path, seed):
    prompts, params = random_prompts(4, 20, 90), some_params(4, logprobs=3)
    wanted = run(make_engine(path), prompts, params)
    engine = make_engine(path, SimulatedRuntime(seed), **OFFLOAD)
    weights = StreamedWeights(engine)
    assert run(engine, prompts, params) == wanted
    steps = engine.stats()["num_decode_steps"] + engine.stats()["num_prefill_steps"]
    num_bytes = sum(len(transfer.source) for transfer in weights.transfers)
    assert engine.stats()["streamed_bytes"] > steps * num_bytes > 0, "KV streams beside"
    assert_pools_as_before(engine)


@pytest.mark.parametrize("rule", ["ring.fill_after_attention", "ring.attention_after_fill"])
def test_the_rings_waits_hold_for_weights(path, rule):
    prompts, params = random_prompts(3, 20, 60), some_params(3)
    wanted = run(make_engine(path), prompts, params)
    for seed in range(20):
        engine = make_engine(path, SimulatedRuntime(seed, dropped_rule=rule), **OFFLOAD)
        StreamedWeights(engine)
        try:
            if run(engine, prompts, params) != wanted:
                return
        except Exception:  # a race that was reported, or nonsense that no sampler takes
            return
    pytest.fail(f"20 seeds ran without {rule!r} and nothing went wrong")


def test_a_transfer_larger_than_a_ring_slot_is_not_begun(path):
    engine = make_engine(path, **OFFLOAD | dict(ring_slot_bytes=LAYER_BLOCK_BYTES))
    StreamedWeights(engine)
    with pytest.raises(AssertionError, match="a ring slot holds less than that"):
        run(engine, random_prompts(1), some_params(1))
