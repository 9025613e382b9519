"""The same questions to transformers, on the same checkpoint: what the engine's answers are compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache

CHUNK_TOKENS = 4096


class ReferenceAnswers:
    """Greedy answers of transformers, in float32 unless said otherwise. The document's cache serves all its questions."""

    def __init__(
        self,
        model_dir: str | Path,
        end_token_id: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, attn_implementation="sdpa")
        self._model, self._end, self._device = model.to(device).eval(), end_token_id, device

    @torch.inference_mode()
    def __call__(self, document: list[int], questions: list[list[int]], max_tokens: int) -> list[list[int]]:
        cache = DynamicCache(config=self._model.config)
        for start in range(0, len(document), CHUNK_TOKENS):
            self._forward(document[start : start + CHUNK_TOKENS], cache)
        found = []
        for question in questions:
            answer, given = [], question
            while len(answer) < max_tokens:
                token = self._forward(given, cache)
                if token == self._end:
                    break
                answer.append(token)
                given = [token]
            found.append(answer)
            cache.crop(len(document) - cache.get_seq_length())  # negative: so many tokens less
        return found

    def _forward(self, token_ids: list[int], cache: DynamicCache) -> int:
        """The likeliest token after these, which the cache then holds."""
        ids = torch.tensor([token_ids], device=self._device)
        logits = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())
