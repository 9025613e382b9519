"""What an engine's outcomes must be, by the oracle."""

from __future__ import annotations

import torch

from checksum.oracle import Oracle
from nanoinfer import SamplingParams
from nanoinfer.sampling.reference import logprobs_of


def check(oracle: Oracle, prompt: list[int], params: SamplingParams, outcome: list) -> None:
    """Compare all log-probabilities of a request, the prompt's too where it has some, and each greedy token.

    They are what shows sums: with the same tokens, another sum has others. outcome: of `engines.outcome`.
    """
    for token_ids, logprobs, _ in outcome:
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
        if params.temperature == 0:
            generated = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
            assert list(token_ids) == generated, "a greedy token is not the largest logit's"
