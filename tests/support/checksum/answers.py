"""What an engine's outcomes must be, by the oracle."""

from __future__ import annotations

import torch
from sampling_cases import build

from checksum.oracle import Oracle
from nanoinfer import SamplingParams
from nanoinfer.sampling.reference import logprobs_of, sample
from nanoinfer.sampling.settings import RowSampling


def check(oracle: Oracle, prompt: list[int], params: SamplingParams, outcome: list) -> None:
    """Compare all log-probabilities of a request, the prompt's too where it has some, and each token that was drawn.

    They are what shows sums: with the same tokens, another sum has others. Of an aborted request what it got so far.
    params: with a seed unless greedy, without min_tokens and limits. outcome: of `engines.outcome`.
    """
    for index, (token_ids, logprobs, reason) in enumerate(outcome):
        assert reason != "length" or len(token_ids) == params.max_tokens
        logits = oracle.logits([*prompt, *token_ids])
        first = len(prompt) if params.prompt_logprobs is None else 1  # the first token that has log-probabilities
        tokens = torch.tensor([*prompt, *token_ids][first:])
        found = [one for one in logprobs or [] if one is not None]
        chosen, ranks, top, top_ids = logprobs_of(logits[first - 1 : -1], tokens, params.logprobs or 0)
        assert len(found) == (len(tokens) if params.logprobs is not None else 0)
        for position, one in enumerate(found):
            token = int(tokens[position])
            wanted = dict(zip(top_ids[position].tolist(), top[position].tolist(), strict=True))
            got = {number: value.logprob for number, value in one.items()}
            where = f"position {first + position} of {len(prompt)} + {len(token_ids)} tokens"
            assert got[token] == float(chosen[position]), where
            assert one[token].rank == int(ranks[position]), where
            assert all(got.get(number, value) == value for number, value in wanted.items()), where
        steps = [
            RowSampling.from_params(
                params,
                seed=(params.seed or 0) + index,
                step=step,
                penalty_token_ids={*prompt, *token_ids[:step]},
                output_token_ids=token_ids[:step],
            )
            for step in range(len(token_ids))
        ]
        if steps:
            drawn = sample(logits[len(prompt) - 1 : -1], build(steps, logits.shape[1])).tolist()
            assert list(token_ids) == drawn, "a token is not what the sampler draws from these logits"
