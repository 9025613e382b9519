"""The runs: how they differ, and how one is played."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from nanoinfer.config import EngineConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.memory import MemoryPlan
from nanoinfer.request import Request
from nanoinfer.sequence import SequenceState
from nanoinfer.verify.record import LogitsRecorder, Recorded
from nanoinfer.verify.report import RunReport
from nanoinfer.verify.workload import Workload
from offload import Runtime


@dataclass(frozen=True)
class Run:
    """One engine's arguments; `switches` changes the mode while requests run.

    Attributes:
        reference: the run that it is compared with; "": the first one that gave something. Its own name: others are
            compared with it, and it with none, because no run before it has the same rows in a step.
    """

    name: str
    what: str
    arguments: dict[str, Any]
    reference: str = ""
    is_required: bool = False
    switches: bool = False
    min_gpu_blocks: int = 0  # smaller pools do not run it


def make_runs(workload: Workload, plan: MemoryPlan) -> list[Run]:
    half = sum(workload.prompt_blocks[: workload.num_rows]) * plan.block_bytes // 2
    # Two requests fill the pool exactly, and it overflows when one of them grows. In offload mode a prefill chunk, its
    # tail and the other request's tail must have room.
    num_crowded = min(2, workload.num_rows)
    chunk = workload.prefill_tokens // workload.block_size
    crowded = max(sum(workload.prompt_blocks[:num_crowded]), chunk + max(2, num_crowded))
    # A step of other rows takes other matrix kernels, and other last bits: fewer rows need a reference of their own, and
    # no tolerance would tell its rounding from a fault. It streams, so that it fits on every GPU.
    fewer_rows = dict(max_num_seqs=num_crowded, cuda_graph_batch_sizes=[num_crowded])
    pairs, at_a_time = [], ""
    if num_crowded < workload.num_rows:
        at_a_time = ", two requests at a time"
        arguments = dict(enable_cpu_offload=True, resident_kv_limit=0) | fewer_rows
        pairs = [Run("pairs", f"every full block streams{at_a_time}", arguments, reference="pairs", is_required=True)]
    return [
        Run(
            "resident", "every KV block on the GPU", dict(enable_cpu_offload=False), min_gpu_blocks=workload.num_blocks
        ),
        Run(
            "streamed",
            "offload mode, every full block streams",
            dict(enable_cpu_offload=True, resident_kv_limit=0),
            is_required=True,
        ),
        Run(
            "mixture",
            "offload mode, about half of the full blocks stay on the GPU",
            dict(enable_cpu_offload=True, resident_kv_limit=max(half, plan.block_bytes)),
            is_required=True,
        ),
        Run(
            "switch",
            "resident mode, to offload, back and again",
            dict(enable_cpu_offload=False, resident_kv_limit=max(half, plan.block_bytes)),
            switches=True,
            min_gpu_blocks=workload.num_blocks,
        ),
        *pairs,
        Run(
            "auto",
            f'enable_cpu_offload="auto", a GPU pool that fills up{at_a_time}',
            dict(
                enable_cpu_offload="auto",
                resident_kv_limit=0,
                **fewer_rows,
                num_gpu_blocks_override=crowded + 1,  # and the scratch block
            ),
            reference=pairs[0].name if pairs else "",
            min_gpu_blocks=crowded,
        ),
    ]


class LeftOut(Exception):
    """This run says nothing on this machine; the text says why."""


def attempt(
    run: Run,
    arguments: dict[str, Any],
    workload: Workload,
    make_runtime: Callable[[str], Runtime],
    report: RunReport,
) -> Recorded | None:
    """The run's tokens and logits; None where it was left out or failed, which the report says."""
    try:
        config = EngineConfig.from_arguments(arguments)
        try:
            engine = LLMEngine(config, make_runtime(run.name))
        except ValueError as error:
            if run.is_required:
                raise
            raise LeftOut(str(error)) from error
    except LeftOut as error:
        report.left_out = str(error)
        return None
    try:
        return _record(run, engine, workload, report)
    except LeftOut as error:
        report.left_out = str(error)
    except MemoryError:
        raise
    except Exception as error:  # whatever a wrong block or a missing wait leads to; the other runs go on
        report.failure = f"{type(error).__name__}: {error}"
    finally:
        device = engine.runner.runtime.device
        engine.close()
        del engine
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return None


def _record(run: Run, engine: LLMEngine, workload: Workload, report: RunReport) -> Recorded:
    """Plays the workload through the engine."""
    num_blocks = engine.runner.kv_cache.gpu_blocks.num_blocks
    if num_blocks < run.min_gpu_blocks:
        raise LeftOut(
            f"the requests need {run.min_gpu_blocks} KV blocks on the GPU, {num_blocks} fit: raise gpu_memory_limit "
            "or lower the context"
        )
    recorder = LogitsRecorder(engine.runner)
    switches = _Switches(engine, workload.num_tokens) if run.switches else None
    requests: list[Request] = []
    most_resident = 0
    with tqdm(total=workload.num_tokens, desc=run.name, unit="tok", disable=not engine.config.progress_bar) as bar:
        while len(requests) < len(workload.prompts) or not all(request.is_finished for request in requests):
            _add_requests(engine, workload, requests)
            if switches is not None:
                switches.before_step(requests)
            bar.update(sum(len(output.token_ids_delta) for output in engine.step()))
            recorder.collect(keep=1)
            most_resident = max(most_resident, engine.runner.kv_cache.num_resident)
    recorder.collect(keep=0)
    stats = engine.stats()
    if engine.config.enable_cpu_offload == "auto" and engine.mode != "offload":
        raise LeftOut(
            "the GPU pool did not fill up, so offload mode was never entered: ask for a longer context or output"
        )
    if stats["host_blocks_total"]:
        report.facts.append(f"{stats['streamed_bytes'] / 2**20:,.1f} MiB streamed")
        report.facts.append(f"at most {most_resident} full blocks stayed on the GPU")
    if switches is not None:
        report.facts += switches.done
    if stats["num_preemptions"]:
        report.facts.append(f"{stats['num_preemptions']} preemptions")
    return Recorded(
        tokens=[request.output().outputs[0].token_ids for request in requests],
        logits=[recorder.rows[request.request_id] for request in requests],
    )


def _add_requests(engine: LLMEngine, workload: Workload, requests: list[Request]) -> None:
    """The first two come together, each later one when the one before it has its first token.

    So a smaller GPU pool, which admits requests later, still computes the same prompts in the same steps.
    """
    while len(requests) < len(workload.prompts):
        number = len(requests)
        if number >= 2 and requests[-1].first_token is None:
            return
        requests.append(engine.add_request(f"verify-{number}", workload.prompts[number], workload.params[number]))


class _Switches:
    """Enters offload mode while a prompt is in prefill, leaves it at half of the tokens, enters it again at 3/4."""

    def __init__(self, engine: LLMEngine, num_tokens: int) -> None:
        self._engine = engine
        self._later = deque([(num_tokens // 2, "resident"), (3 * num_tokens // 4, "offload")])
        self._first_at_the_latest = num_tokens // 4
        self.done: list[str] = []

    def before_step(self, requests: list[Request]) -> None:
        num_tokens = sum(sequence.num_generated for request in requests for sequence in request.sequences)
        if not self.done:
            states = [sequence.state for sequence in self._engine.scheduler.running]
            is_mixed = SequenceState.PREFILL in states and SequenceState.DECODE in states
            if is_mixed or num_tokens >= self._first_at_the_latest:
                self._switch("offload", num_tokens)
        elif self._later and num_tokens >= self._later[0][0]:
            self._switch(self._later.popleft()[1], num_tokens)

    def _switch(self, mode: str, num_tokens: int) -> None:
        in_prefill = sum(sequence.state is SequenceState.PREFILL for sequence in self._engine.scheduler.running)
        self._engine.switch_mode(mode)
        self.done.append(f"to {mode} after {num_tokens} tokens ({in_prefill} in prefill)")
