"""The runs, and how they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanoinfer.memory.plan import MemoryPlan
from nanoinfer.verify.workload import Workload

Stats = dict[str, Any]
WIDE_ROWS = 24
"""More rows than the kernels for few rows take."""
MAX_CHUNKS = 40
"""Of the longest prompt, where these are longer than two thirds of a block."""
MAX_CAPTURED_TOKENS = 512


@dataclass(frozen=True)
class Run:
    """One engine's arguments, and what is asked of it.

    Attributes:
        is_required: where the engine refuses its arguments, that is the user's to know.
        switches: the mode changes while requests run.
        asks_twice: the prompts are asked again once all have been answered; these second answers are compared.
        num_completions: of each request; the first of them is compared, and all of them where it is greedy.
        min_gpu_blocks: smaller pools do not run it.
        happened: whether the engine's `stats` show what the run is for; if not it says nothing, because of `otherwise`.
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


def make_runs(workload: Workload, plan: MemoryPlan) -> list[Run]:
    """All runs, the reference first.

    Args:
        plan: of offload mode, with the arguments that all runs have.
    """
    return [*_places(workload, plan), *_neighbours(workload, plan), *_reuse(workload, plan)]


def _places(workload: Workload, plan: MemoryPlan) -> list[Run]:
    """Other places for the KV blocks, with the same steps."""
    half = max(sum(workload.prompt_blocks[: workload.num_rows]) * plan.block_bytes // 2, plan.block_bytes)
    # Two requests fill the pool exactly, and it overflows when one of them grows. In offload mode a prefill chunk, its
    # tail and the other request's tail must have room.
    num_crowded = min(2, workload.num_rows)
    chunk = workload.prefill_tokens // workload.block_size
    crowded = max(sum(workload.prompt_blocks[:num_crowded]), chunk + max(2, num_crowded))
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
    ]


def _neighbours(workload: Workload, plan: MemoryPlan) -> list[Run]:
    """Other steps: what is computed beside a request, and in how many pieces its prompt."""
    home = _home(workload, plan)
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


def _reuse(workload: Workload, plan: MemoryPlan) -> list[Run]:
    """KV that is found again, put aside or shared."""
    home = _home(workload, plan) | dict(enable_prefix_caching=True)
    preempted = []
    if len(workload.prompts) > 1:
        preempted = [
            Run(
                "preempted",
                "resident mode with a GPU pool so small that sequences are preempted",
                dict(enable_cpu_offload=False, num_gpu_blocks_override=_smallest_pool(workload)) | _rows(2),
                min_gpu_blocks=_smallest_pool(workload) - 1,
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
            otherwise="no beginning was found again: the pools are too small to keep one",
        ),
        *preempted,
        Run("n=2", "two completions of each request, which share blocks of its prompt", home, num_completions=2),
    ]


_STREAMED = dict(enable_cpu_offload=True, resident_kv_limit=0)


def _home(workload: Workload, plan: MemoryPlan) -> dict[str, Any]:
    """Where KV lies in the runs that are not about that: on the GPU, if it holds all."""
    return dict(enable_cpu_offload=False) if plan.num_gpu_blocks > workload.num_blocks else _STREAMED


def _rows(count: int, padded: int | None = None) -> dict[str, Any]:
    """So many requests at a time, in decode steps of as many rows, or of `padded`."""
    return dict(max_num_seqs=count, cuda_graph_batch_sizes=[padded or count])


def _smallest_pool(workload: Workload) -> int:
    """Blocks of a GPU pool, the scratch block included, that two prompts fill, so that it overflows when one grows."""
    smallest = -(-workload.max_model_len // workload.block_size) + 2  # what an engine takes
    blocks = workload.prompt_blocks
    sums = [1 + one + other for one, other in zip(blocks, blocks[1:], strict=False)]
    return min((count for count in sums if count >= smallest), default=smallest)
