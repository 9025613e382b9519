"""The requests whose answers are compared, the other requests beside them, and which requests run at once."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from nanoinfer.measure.run import Load, mixed_params
from nanoinfer.sampling_params import SamplingParams

# The smallest token id in prompts: smaller ids are often special tokens.
_FIRST_ID = 3
MAX_PROMPT_BLOCKS = 3


# Requests that run at once: the number of a compared request, or None for others, its prompt and its parameters.
Crowd = list[tuple[int | None, list[int], SamplingParams]]


@dataclass(frozen=True)
class Workload(Load):
    """The compared requests. Other requests are drawn as needed."""

    vocab_size: int
    block_size: int
    output_len: int
    seed: int

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest possible request, compared or not."""
        return max(*self.lengths, self.block_size + self.output_len)

    @property
    def longest_prompt(self) -> int:
        return max(map(len, self.prompts))

    @property
    def num_blocks(self) -> int:
        """KV blocks that all compared requests need at once."""
        return sum(-(-length // self.block_size) for length in self.lengths)

    def crowds(self, size: int) -> list[Crowd]:
        """Divide all requests into crowds of `size` and fill the last one up with other requests.

        The order is random, but the same for the same size.
        """
        generator = random.Random(self.seed * 1_000_003 + size)
        order = list(range(len(self.prompts)))
        generator.shuffle(order)
        found: list[Crowd] = []
        for begin in range(0, len(order), size):
            numbers = order[begin : begin + size]
            crowd: Crowd = [(number, self.prompts[number], self.params[number]) for number in numbers]
            crowd += [(None, *self._other(generator)) for _ in range(size - len(crowd))]
            generator.shuffle(crowd)
            found.append(crowd)
        return found

    def _other(self, generator: random.Random) -> tuple[list[int], SamplingParams]:
        prompt = _tokens(generator, self.vocab_size, generator.randint(1, self.block_size))
        max_tokens = generator.randint(1, self.output_len)
        temperature = generator.choice([0.0, 1.0])
        return prompt, SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)


def make_workload(num_requests: int, vocab_size: int, block_size: int, output_len: int, seed: int) -> Workload:
    """Make prompts of different lengths up to three blocks; half of them share their beginning with others.

    Their parameters are those of `mixed_params`; some end earlier.
    """
    generator = random.Random(seed)
    # One beginning ends inside a block, the other at a block edge.
    beginnings = [_tokens(generator, vocab_size, length) for length in (block_size + block_size // 2, 2 * block_size)]
    prompts, params = [], []
    for i in range(num_requests):
        begin = beginnings[i // 4 % 2] if i // 2 % 2 else []
        num_own = generator.randint(1, MAX_PROMPT_BLOCKS * block_size - len(begin))
        prompts.append(begin + _tokens(generator, vocab_size, num_own))
        params.append(mixed_params(i, seed, max(1, output_len - i % 4 * (output_len // 8))))
    return Workload(prompts, params, vocab_size, block_size, output_len, seed)


def _tokens(generator: random.Random, vocab_size: int, count: int) -> list[int]:
    return [generator.randrange(_FIRST_ID, vocab_size) for _ in range(count)]


def all_answers(workload: Workload, size: int, ask: Callable[[Crowd], dict]) -> list:
    """Send all requests in crowds of `size`; return one answer per request, in the order of the requests."""
    found: dict = {}
    for crowd in workload.crowds(size):
        found |= ask(crowd)
    return [found[number] for number in range(len(workload.prompts))]
