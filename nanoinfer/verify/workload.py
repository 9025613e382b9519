"""The requests of every run, and how long they can be on this machine."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from nanoinfer.config import EngineConfig
from nanoinfer.measure.run import Load, mixed_params, random_prompts
from nanoinfer.memory.setup import Setup
from offload import KVGroups

# Prompt lengths as shares of the context. The first request decodes, and ends, while others are in prefill.
LENGTH_SHARES = (0.25, 1.0, 0.5, 0.75)
LONGEST_DEFAULT_CONTEXT, LONGEST_ON_HOST = 4096, 160
BLOCK_ON_HOST = 64
DEFAULT_OUTPUT, OUTPUT_ON_HOST = 32, 8
MAX_PREFILL_TOKENS = 2048


@dataclass(frozen=True)
class Workload(Load):
    """Requests, in the order in which they come."""

    groups: KVGroups

    @property
    def block_size(self) -> int:
        return self.groups.block_size

    @property
    def num_rows(self) -> int:
        """Requests that run at once: all but the last, which reuses the blocks of the first request that ends."""
        return max(1, len(self.prompts) - 1)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of one prefill step: a quarter of the longest prompt, so that prompts come in several chunks."""
        wanted = min(MAX_PREFILL_TOKENS, max(map(len, self.prompts)) // 4)
        return max(1, wanted // self.block_size) * self.block_size

    @property
    def num_blocks(self) -> int:
        """KV blocks that the running requests can need at once."""
        return sum(map(self.groups.most_blocks, sorted(self.lengths)[-self.num_rows :]))

    @property
    def prompt_blocks(self) -> list[int]:
        """KV blocks of each prompt."""
        return [self.groups.most_blocks(len(prompt)) for prompt in self.prompts]

    @property
    def first_blocks(self) -> list[int]:
        """KV blocks that each request wants on the GPU to begin: all that it ever holds where a window bounds them."""
        return [
            sum(group.most_blocks(len(prompt) if group.window is None else length) for group in self.groups)
            for prompt, length in zip(self.prompts, self.lengths, strict=True)
        ]

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine arguments that all runs share. A run overrides those that it tests."""
        return dict(
            max_num_seqs=self.num_rows,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.prefill_tokens,
            cuda_graph_batch_sizes=[self.num_rows],
        )


def make_workload(
    vocab_size: int, num_requests: int, context: int, output_len: int, groups: KVGroups, seed: int
) -> Workload:
    """Make random prompts of several lengths up to `context` tokens. Every request fills a block while it decodes.

    Their parameters are those of `mixed_params`. The first request is the shortest and ends at half of `output_len`.
    """
    shares, block_size = LENGTH_SHARES if num_requests > 1 else (1.0,), groups.block_size
    lengths, params = [], []
    for i in range(num_requests):
        max_tokens = output_len if i else max(2, output_len // 2)
        num_blocks = max(1, int(shares[i % len(shares)] * (context // block_size)))
        until_full = 1 + (i * (max_tokens - 2) // num_requests) % (block_size - 1)
        lengths.append(num_blocks * block_size - until_full)
        params.append(mixed_params(i, seed, max_tokens))
    return Workload(random_prompts(vocab_size, lengths, seed), params, groups)


def choose_workload(
    setup: Setup, arguments: dict[str, Any], num_requests: int, context: int | None, output_len: int | None, seed: int
) -> Workload:
    """Return the requests for `context` tokens; for None, the longest requests that fit together in resident mode."""
    block_size, spec, is_host = setup.config.block_size, setup.spec, setup.device.is_host
    output_len = output_len or (OUTPUT_ON_HOST if is_host else DEFAULT_OUTPUT)
    shortest, longest = 2 * block_size, spec.max_position - output_len

    def workload(tokens: int) -> Workload:
        return make_workload(spec.vocab_size, num_requests, tokens, output_len, spec.kv_groups, seed)

    if longest < shortest:
        raise ValueError(
            f"the model allows {spec.max_position} positions, a request of two KV blocks of {block_size} tokens with "
            f"{output_len} generated tokens needs {shortest + output_len}: lower block_size or output_len"
        )
    if context is not None:
        if not shortest <= context <= longest:
            raise ValueError(
                f"context={context} must be from {shortest} (two KV blocks: with less, nothing streams) to {longest} "
                f"(the model's {spec.max_position} positions less {output_len} generated tokens)"
            )
        return workload(context)
    tokens = max(shortest, min(LONGEST_ON_HOST if is_host else LONGEST_DEFAULT_CONTEXT, longest))
    while tokens > shortest:
        candidate = workload(tokens)
        with suppress(ValueError):
            if setup.plan(EngineConfig(**arguments | candidate.arguments)).num_gpu_blocks > candidate.num_blocks:
                return candidate
        tokens = max(shortest, tokens // 2)
    return workload(shortest)
