"""Performs one run: sends the requests through the run's own engine and records the results."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from nanoinfer.common.units import counted
from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.measure.logits import LogitsRecorder
from nanoinfer.measure.run import free_memory
from nanoinfer.requests.request import Request
from nanoinfer.requests.sequence import SequenceState
from nanoinfer.verify.report import Answer, RunReport
from nanoinfer.verify.runs import Run, Stats
from nanoinfer.verify.workload import Workload
from offload import Runtime


def attempt(
    run: Run,
    arguments: dict[str, Any],
    workload: Workload,
    make_runtime: Callable[[str], Runtime],
    report: RunReport,
) -> list[Answer] | None:
    """Return the run's tokens and logits; None if the run was left out or failed, which the report then says."""
    config = EngineConfig(**arguments)
    try:
        engine = LLMEngine(config, make_runtime(run.name))
    except ValueError as error:
        if run.is_required:
            raise
        report.left_out = str(error)
        return None
    try:
        return _record(run, engine, workload, report)
    except MemoryError:
        raise
    except Exception as error:  # a wrong block or a missing wait may lead to any error; the other runs go on
        report.failure = f"{type(error).__name__}: {error}"
        return None
    finally:
        engine.close()
        del engine
        free_memory()


def _record(run: Run, engine: LLMEngine, workload: Workload, report: RunReport) -> list[Answer] | None:
    """Run the workload on the engine and return the answers; None if the run would prove nothing on this machine."""
    num_blocks = engine.kv_cache.tables.gpu_blocks.num_blocks
    if num_blocks < run.min_gpu_blocks:
        report.left_out = (
            f"the requests need {run.min_gpu_blocks} KV blocks on the GPU, {num_blocks} fit: raise gpu_memory_limit "
            "or lower the context"
        )
        return None
    recorder = LogitsRecorder(engine)
    total = workload.num_output_tokens
    modes = [(total // 4, "offload"), (total // 2, "resident"), (3 * total // 4, "offload")]
    due = deque(modes if run.switches else [])
    switches: list[str] = []
    num_passes, most_resident = 2 if run.asks_twice else 1, 0
    requests: list[Request] = []
    num_tokens = total * run.num_completions * num_passes
    with tqdm(total=num_tokens, desc=run.name, unit="tok", disable=not engine.config.progress_bar) as bar:
        for number in range(num_passes):
            requests = []
            recorder.rows.clear()  # keep the logits of the last pass only
            while len(requests) < len(workload.prompts) or not all(request.is_finished for request in requests):
                _add_requests(engine, workload, requests, run.num_completions, f"verify-{number}")
                _switch(engine, requests, due, switches)
                bar.update(sum(len(output.token_ids_delta) for output in engine.step()))
                recorder.collect(keep=1)
                most_resident = max(most_resident, engine.kv_cache.copies.num_resident)
            recorder.collect(keep=0)
    stats = engine.stats()
    if not run.happened(stats):
        report.left_out = run.otherwise
        return None
    report.facts += _facts(stats, most_resident, switches)
    return _answers(requests, recorder)


def _facts(stats: Stats, most_resident: int, switches: list[str]) -> list[str]:
    facts, streams = [], stats["streamed_bytes"] or most_resident  # a host pool may hold what gave way alone
    if streams:
        facts.append(f"{stats['streamed_bytes'] / 2**20:,.1f} MiB streamed")
    if stats["expert_fetches"]:
        facts.append(f"{stats['expert_hit_rate']:.0%} of the chosen experts were on the GPU")
    if streams and stats["host_blocks_total"]:
        facts.append(f"at most {most_resident} full blocks stayed on the GPU")
    facts += switches
    if stats["num_mixed_steps"]:
        facts.append(counted(stats["num_mixed_steps"], "mixed step"))
    if stats["prefix_cache_hit_tokens"]:
        facts.append(f"{stats['prefix_cache_hit_tokens']:,} prompt tokens from the prefix cache")
    if stats["num_preemptions"]:
        facts.append(counted(stats["num_preemptions"], "preemption"))
    return facts


def _answers(requests: list[Request], recorder: LogitsRecorder) -> list[Answer]:
    """Return the first completion of each request; of greedy requests all completions, which must be equal."""
    return [
        Answer(number, completion.token_ids, recorder.rows[request.request_id, completion.index])
        for number, request in enumerate(requests)
        for completion in request.output().outputs
        if completion.index == 0 or request.params.is_greedy
    ]


def _add_requests(
    engine: LLMEngine, workload: Workload, requests: list[Request], num_completions: int, name: str
) -> None:
    """Add the first two requests together, and each later one when the one before it has its first token, or failed.

    So some requests decode while others are in prefill, and some end before others arrive.
    """
    while len(requests) < len(workload.prompts):
        number = len(requests)
        if number >= 2 and requests[-1].first_token is None and not requests[-1].is_finished:
            return
        params = replace(workload.params[number], n=num_completions)
        requests.append(engine.add_request(f"{name}-{number}", workload.prompts[number], params))


def _switch(engine: LLMEngine, requests: list[Request], due: deque[tuple[int, str]], done: list[str]) -> None:
    """Enter the next mode that is due after so many tokens; the first also while a prompt is in prefill."""
    num_tokens = sum(sequence.num_generated for request in requests for sequence in request.sequences)
    states = [sequence.state for sequence in engine.scheduler.running]
    is_mixed = SequenceState.PREFILL in states and SequenceState.DECODE in states
    if due and (num_tokens >= due[0][0] or (is_mixed and not done)):
        _, mode = due.popleft()
        engine.switch_mode(mode)
        done.append(f"to {mode} after {num_tokens} tokens ({states.count(SequenceState.PREFILL)} in prefill)")
