"""Masks on their way to the device: no buffer is overwritten while it is read, and each row gets its own."""

import numpy as np
import pytest
import torch
from prefill_graphs import WarmUpRuntime
from simulated import RaceError

from nanoinfer.devices.cpu import CpuDevice
from nanoinfer.execution.graphs import Graphs
from nanoinfer.execution.token_masks import TokenMasks
from nanoinfer.kernels import reference
from nanoinfer.kernels.operations import operations_of
from nanoinfer.structured.matcher import mask_of

VOCAB = 70


def wanted_of(logits: torch.Tensor, masks: list[tuple[int, list[int]]]) -> torch.Tensor:
    wanted = logits.clone()
    for row, allowed in masks:
        stays = torch.zeros(logits.shape[1], dtype=torch.bool)
        stays[allowed] = True
        wanted[row, ~stays & (logits[row] < torch.inf)] = -torch.inf
    return wanted


def lines_of(masks: list[tuple[int, list[int]]], vocab_size: int = VOCAB) -> np.ndarray:
    words = -(-vocab_size // 32)
    return np.stack([np.concatenate([np.int32([row]), mask_of(allowed, words)]) for row, allowed in masks])


@pytest.fixture(params=[True, False], ids=["reads host memory", "copies"], autouse=True)
def reads_host_memory(request, monkeypatch):
    monkeypatch.setattr(CpuDevice, "is_host", request.param)


def run(seed: int | None, rule: str | None = None, has_graphs: bool = True) -> bool:
    """Whether each of several steps, none of which is waited for, gets its own masks."""
    runtime = WarmUpRuntime(seed=seed, dropped_rule=rule)
    compute, generator, logits = runtime.stream("compute"), np.random.default_rng(0), torch.zeros(7, VOCAB)
    graphs = Graphs(runtime, compute)
    masks = TokenMasks(runtime, compute, graphs, logits)
    for work in masks.works() if has_graphs else ():
        graphs.capture(work)
    assert not logits.any(), "a warm-up run masks nothing"
    found, wanted = [], []
    for step in range(9):
        given = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(step))
        rows = generator.permutation(7)[: generator.integers(1, 8)].tolist()
        allowed = [(row, generator.choice(VOCAB, 9, replace=False).tolist()) for row in rows]
        wanted.append(wanted_of(given, allowed))
        compute.run(lambda given=given: logits.copy_(given))
        masks.apply(lines_of(allowed))
        compute.run(lambda: found.append(logits.clone()))
    runtime.synchronize()
    assert runtime.num_replays == len(found) * has_graphs
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("has_graphs", [True, False])
@pytest.mark.parametrize("seed", [None, *range(10)])
def test_steps_that_nobody_waits_for_get_their_own_masks(seed, has_graphs):
    assert run(seed, has_graphs=has_graphs)


def test_a_removed_wait_is_noticed():
    rule = "staging.fill_after_upload"
    for seed in range(200):
        try:
            if not run(seed, rule):
                return
        except RaceError:
            return
    pytest.fail(f"200 seeds ran without {rule!r} and nothing went wrong")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_writes_what_the_reference_writes(vocab_size, dtype):
    apply_masks = operations_of("cuda").apply_masks
    generator = np.random.default_rng(vocab_size)
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[3, vocab_size // 2], logits[4, 0], logits[1, -1] = torch.nan, torch.inf, -torch.inf
    count = max(1, vocab_size // 3)
    masks = [(row, generator.choice(vocab_size, count, replace=False).tolist()) for row in (4, 0, 3)]
    unused = [(-1, [])]
    lines, wanted = torch.from_numpy(lines_of(masks + unused, vocab_size)), wanted_of(logits, masks)
    for apply in (apply_masks, reference.apply_masks):
        found = logits.clone()
        apply(found, lines)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), "rows without a mask keep their bits"
