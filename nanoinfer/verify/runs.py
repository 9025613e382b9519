"""The runs, and how they differ."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanoinfer.models.base import SparseSpec
from nanoinfer.step.memory_plan import MemoryPlan
from nanoinfer.verify.workload import Workload
from offload.reserve import StepReserve

Stats = dict[str, Any]
WIDE_ROWS = 24
"""More rows than the kernels for few rows accept."""
MAX_CHUNKS = 40
"""The most chunks of the longest prompt, if a chunk is longer than two thirds of a block."""
MAX_CAPTURED_TOKENS = 512
_STREAMED = dict(enable_cpu_offload=True, resident_kv_limit=0)
# A run with this says nothing of where weights lie.
_NO_WEIGHTS = dict(resident_weights_limit=None, cpu_offload_gb=None, expert_slots=None)


@dataclass(frozen=True)
class Run:
    """The engine arguments of one run, and what the run does.

    Attributes:
        is_required: if the engine refuses the arguments, the error is raised instead of leaving the run out.
        switches: whether the mode changes while requests run.
        asks_twice: whether the prompts are sent again after all were answered; then the second answers are compared.
        num_completions: completions of each request. The first one is compared; all of them if the request is greedy.
        min_gpu_blocks: the run is left out if the GPU pool is smaller.
        happened: tells from the engine's `stats` whether the run did what it is for. If not, it proves nothing, and
            `otherwise` is the reason given.
    """

    name: str
    what: str
    arguments: dict[str, Any]
    is_required: bool = False
    switches: bool = False
    asks_twice: bool = False
    num_completions: int = 1
    min_gpu_blocks: int = 0
    happened: Callable[[Stats], bool] = lambda stats: True
    otherwise: str = ""


def make_runs(workload: Workload, plan: MemoryPlan, sparse: SparseSpec | None = None, num_ranks: int = 1) -> list[Run]:
    """Return all runs, the reference first.

    Args:
        plan: the memory plan of offload mode, with the arguments that all runs share.
        sparse: what is sparse in the model.
        num_ranks: GPUs of a last run that computes with several.
    """
    # Where KV lies in runs that do not test it: on the GPU if all of it fits there.
    home = dict(enable_cpu_offload=False) if plan.num_gpu_blocks > workload.num_blocks else _STREAMED
    ranks = [
        Run("ranks", f"{num_ranks} GPUs, every full block streams", _STREAMED | dict(tensor_parallel_size=num_ranks))
    ]
    runs = [*_places(workload, plan), *_slots(sparse), *_neighbours(workload, home), *_reuse(workload, home)]
    return runs + ranks * (num_ranks > 1)


def _places(workload: Workload, plan: MemoryPlan) -> list[Run]:
    """Return runs with the same steps but other places for the KV blocks, or for weights."""
    half = max(sum(workload.prompt_blocks[: workload.num_rows]) * plan.block_bytes // 2, plan.block_bytes)
    # Two requests fill the pool exactly, and it overflows when one of them grows. In offload mode a prefill chunk, its
    # tail and the other request's tail must have room.
    num_crowded = min(2, workload.num_rows)
    chunk, tails = workload.groups.chunk_blocks(workload.prefill_tokens), len(workload.groups) * max(2, num_crowded)
    crowded = max(sum(workload.prompt_blocks[:num_crowded]), chunk + tails)
    return [
        Run(
            "resident", "every KV block on the GPU", dict(enable_cpu_offload=False), min_gpu_blocks=workload.num_blocks
        ),
        Run("streamed", "offload mode, every full block streams", _STREAMED, is_required=True),
        Run(
            "mixture",
            "offload mode, about half of the full blocks stay on the GPU",
            dict(enable_cpu_offload=True, resident_kv_limit=half),
            is_required=True,
        ),
        Run(
            "switch",
            "resident mode, to offload, back and again",
            dict(enable_cpu_offload=False, resident_kv_limit=half),
            switches=True,
            min_gpu_blocks=workload.num_blocks,
        ),
        Run(
            "auto",
            'enable_cpu_offload="auto", a GPU pool that fills up',
            dict(enable_cpu_offload="auto", resident_kv_limit=0)
            | _rows(num_crowded)
            | dict(num_gpu_blocks_override=crowded + 1),  # and the scratch block
            min_gpu_blocks=crowded,
            happened=lambda stats: stats["mode"] == "offload",
            otherwise="the GPU pool did not fill up, so offload mode was never entered: ask for a longer context or "
            "output",
        ),
        Run(
            "weights",
            "the weights of layers and head in host memory, streamed in every step beside the KV",
            _STREAMED | _NO_WEIGHTS | dict(resident_weights_limit=0),
            happened=lambda stats: stats["streamed_weight_bytes"] > 0,
            otherwise="no weights were streamed: the model has one piece only",
        ),
    ]


def _slots(sparse: SparseSpec | None) -> list[Run]:
    """Return a run of a sparse model whose experts lie in host memory, with a quarter of them in slots."""
    if sparse is None:
        return []
    return [
        Run(
            "experts",
            "all experts in host memory, a quarter of each layer's in slots, KV streamed beside",
            _STREAMED | _NO_WEIGHTS | dict(expert_slots=max(sparse.most_chosen, sparse.num_experts // 4)),
            happened=lambda stats: stats["expert_fetches"] > 0,
            otherwise="no expert was brought: every step was a large one",
        )
    ]


def _neighbours(workload: Workload, home: dict[str, Any]) -> list[Run]:
    """Return runs with other steps: other neighbours in the batch, or other chunks of the prompt."""
    longest = max(map(len, workload.prompts))
    chunk = min(workload.prefill_tokens - 1, max(2 * workload.block_size // 3, longest // MAX_CHUNKS)) | 1
    chunks = dict(max_num_batched_tokens=chunk, capture_num_tokens=[min(chunk, MAX_CAPTURED_TOKENS)])
    alone = [Run("alone", "one request after the other", home | _rows(1))] if workload.num_rows > 1 else []
    return [
        *alone,
        Run(
            "pairs",
            f"at most two requests at a time, decode steps padded to {WIDE_ROWS} rows, prompts in steps of their own",
            home | _rows(min(2, len(workload.prompts)), WIDE_ROWS) | dict(capture_num_tokens=[]),
        ),
        Run(
            "chunk",
            f"prompts in chunks of at most {chunk} tokens, small ones together with running requests",
            home | chunks,
        ),
        Run("eager", "no CUDA graphs", home | dict(enforce_eager=True)),
    ]


def _reuse(workload: Workload, home: dict[str, Any]) -> list[Run]:
    """Return runs whose KV is found in the prefix cache, saved and restored, or shared."""
    home = home | dict(enable_prefix_caching=None)
    preempted = []
    if len(workload.prompts) > 1:
        pool = _smallest_pool(workload)
        preempted = [
            Run(
                "preempted",
                "resident mode with a GPU pool so small that sequences are preempted",
                dict(enable_cpu_offload=False, num_gpu_blocks_override=pool) | _rows(2),
                min_gpu_blocks=pool - 1,
                happened=lambda stats: stats["num_preemptions"] > 0,
                otherwise="no sequence was preempted: ask for more requests, a longer context or output",
            )
        ]
    return [
        Run(
            "prefix",
            "every prompt asked twice, the second time with its beginning from the prefix cache",
            home,
            asks_twice=True,
            happened=lambda stats: stats["prefix_cache_hit_tokens"] > 0,
            otherwise="no beginning was found again: the pools are too small to keep one, or layers keep states",
        ),
        *preempted,
        Run("n=2", "two completions of each request, which share blocks of its prompt", home, num_completions=2),
    ]


def _rows(count: int, padded: int | None = None) -> dict[str, Any]:
    """Return arguments for `count` requests at a time, in decode steps of `count` rows, or of `padded` rows."""
    return dict(max_num_seqs=count, cuda_graph_batch_sizes=[padded or count])


def _smallest_pool(workload: Workload) -> int:
    """Return the blocks of a GPU pool, with the scratch block, that two prompts fill: it overflows when one grows."""
    groups = workload.groups
    smallest = groups.most_blocks(workload.max_model_len) + len(groups) + 1  # the smallest pool that an engine accepts
    blocks = workload.first_blocks
    sums = [one + other for one, other in zip(blocks, blocks[1:], strict=False)]
    sums = sums[1:] or sums  # the first request ends too early to grow

    reserve = StepReserve(groups, workload.prefill_tokens)
    prompts = reserve.longest(workload.max_model_len, 2)

    def lets_in(num_blocks: int, size: int) -> bool:
        return num_blocks + reserve.resident(prompts, size, num_growing=2) <= size

    counts = (
        1 + next(size for size in itertools.count(num_blocks) if lets_in(num_blocks, size)) for num_blocks in sums
    )
    return min((size for size in counts if size >= smallest), default=smallest)
