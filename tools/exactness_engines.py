"""Send requests to engines of this process: the tested settings, and the answers with their raw logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from exactness_comparison import NUM_LOGPROBS, Answer, Condition, token_logprobs
from exactness_workload import Crowd, Workload, all_answers

from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.measure.logits import LogitsRecorder
from nanoinfer.measure.run import free_memory
from nanoinfer.outputs import CompletionOutput

# Requests at once in conditions that differ in the engine.
CROWD = 16


class EngineAsker:
    """Sends requests to an engine, and keeps the logits of the compared requests.

    Attributes:
        at_once: the most requests that ran at once in the current condition.
        failures: errors of its compared requests, whose answers end early.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self.at_once = engine, 0
        self.failures: list[str] = []
        self._recorder = LogitsRecorder(engine, lambda name: name.startswith("compared"))
        self._num_asked = 0

    def condition(
        self, name: str, workload: Workload, size: int, *, with_logprobs: bool = False
    ) -> tuple[Condition, list[Answer]]:
        """Send all requests, `size` at once. Return the condition, before anything is compared, and the answers."""
        self.at_once, self.failures = 0, []
        answers = all_answers(workload, size, partial(self.ask, with_logprobs=with_logprobs))
        return Condition(name, self.at_once, failure=next(iter(self.failures), None)), answers

    def ask(self, crowd: Crowd, *, with_logprobs: bool = False) -> dict[int, Answer]:
        """Run the requests of a crowd together. Return the answers to the compared requests, by request number."""
        self._num_asked += 1
        requests = []
        for place, (number, prompt, params) in enumerate(crowd):
            name = f"{'other' if number is None else 'compared'}-{self._num_asked}-{place}"
            if with_logprobs and number is not None:
                params = replace(params, logprobs=NUM_LOGPROBS)
            requests.append(self.engine.add_request(name, prompt, params))
        while not all(request.is_finished for request in requests):
            self.engine.step()
            self.at_once = max(self.at_once, len(self.engine.scheduler.running))
            self._recorder.collect(keep=1)
        self._recorder.collect(keep=0)
        found = {}
        for (number, *_), request in zip(crowd, requests, strict=True):
            if number is not None:
                if request.error is not None:
                    self.failures.append(request.error)
                completion = request.output().outputs[0]
                rows = self._recorder.rows.pop((request.request_id, 0))[: len(completion.token_ids)]
                found[number] = Answer(completion.token_ids, logits=rows, logprobs=_logprobs(completion))
        return found


def _logprobs(completion: CompletionOutput) -> list[list[float]] | None:
    if completion.logprobs is None:
        return None
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return [token_logprobs(entry[token].logprob, [one.logprob for one in entry.values()]) for token, entry in pairs]


@contextmanager
def open_engine(arguments: dict[str, Any]) -> Iterator[EngineAsker]:
    """Open an engine with these arguments; free its memory afterwards, even if the asker is still referenced."""
    asker = EngineAsker(LLMEngine(EngineConfig(**arguments)))
    try:
        yield asker
    finally:
        asker.engine.close()
        del asker.engine, asker._recorder
        free_memory()


def make_settings(names: list[str], workload: Workload) -> dict[str, dict[str, Any]]:
    """Return the settings that are compared with the reference's engine: their engine arguments, by title."""
    rows = min(CROWD, len(workload.prompts))
    block_size = workload.block_size
    # Prefill chunk: an odd number of tokens, so that the longest prompt has two or three chunks.
    chunk = max(block_size // 2, workload.longest_prompt // 3) | 1
    step = -(-workload.longest_prompt // block_size)
    # Blocks of the pool for "auto": a third of what the requests need, but at least a chunk and the tail of each row.
    # With few rows this minimum is small.
    few = -(-rows // 2)
    pool = max(workload.num_blocks // 3, step + 2 + few)
    streams = dict(max_num_seqs=rows, max_num_batched_tokens=step * block_size, resident_kv_limit=0)
    settings = {
        "chunk": (f"prefill chunk of {chunk}", dict(max_num_seqs=rows, max_num_batched_tokens=chunk)),
        "offload": ("offload", streams | dict(enable_cpu_offload=True)),
        "auto": (
            "auto", streams | dict(enable_cpu_offload="auto", max_num_seqs=few, num_gpu_blocks_override=pool + 1)
        ),
        "prefix": ("prefix caching", dict(enable_prefix_caching=True)),
    }  # fmt: skip
    return dict(setting for name, setting in settings.items() if name in names)


def ask_setting(title: str, arguments: dict[str, Any], workload: Workload, wanted: list[Answer]) -> list[Condition]:
    """Send all requests to an engine, `CROWD` at once, twice where it caches prefixes; a condition for each time."""
    found: list[Condition] = []
    try:
        with open_engine(arguments) as asker:
            for name in (title, f"{title}, again")[: 1 + asker.engine.config.enable_prefix_caching]:
                condition, answers = asker.condition(name, workload, min(CROWD, len(workload.prompts)))
                _note_facts(condition, asker.engine)
                if condition.left_out is None:
                    condition.compare(wanted, answers)
                found.append(condition)
    except (ValueError, MemoryError) as error:  # this setting does not fit on this machine; the reference did
        found.append(Condition(f"{title}, again" if found else title, left_out=str(error)))
    return found


def _note_facts(condition: Condition, engine: LLMEngine) -> None:
    """Note what happened in the engine so far, and whether the condition proves nothing."""
    stats, config = engine.stats(), engine.config
    if engine.mode == "offload":
        condition.facts.append(f"{stats['streamed_bytes'] / 2**20:,.1f} MiB streamed")
    elif config.enable_cpu_offload == "auto" and not condition.failure:
        condition.left_out = (
            "the GPU pool did not fill up, so offload mode was never entered: give a longer --output-len"
        )
    if config.enable_prefix_caching:
        hits, queried = stats["prefix_cache_hit_tokens"], stats["prefix_cache_queried_tokens"]
        condition.facts.append(f"{hits:,} of {queried:,} prompt tokens so far were found")


def check_finite(answers: list[Answer]) -> None:
    """Raise ValueError if the reference's logits are not finite: such logits are equal whatever is wrong."""
    for answer in answers:
        if not all(bool(torch.isfinite(row).all()) for row in answer.logits):
            raise ValueError("logits of a request alone are not finite: try another --dtype, or check the checkpoint")
