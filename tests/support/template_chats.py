"""A chat session whose engine answers by heart: what is real is all between a question and the prompt's token ids."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from transformers import PreTrainedTokenizerBase

from nanoinfer.engine.meter import DecodeTimes
from nanoinfer.outputs import RequestMetrics, StreamOutput
from nanoinfer.sampling_params import SamplingParams

OWN = Path(__file__).resolve().parents[1] / "chat" / "templates"


def templates() -> dict[str, Path]:
    """Return the templates to test with: those of the folder TEMPLATES, or our own."""
    found = {path.stem: path for path in sorted(Path(os.environ.get("TEMPLATES") or OWN).glob("*.jinja"))}
    assert found, "the folder TEMPLATES has no *.jinja"
    return found


class AnswersByHeart:
    """Of an LLM what `EngineModel` needs. Gives the answers in turn, as a model would: token by token behind a prompt.

    Attributes:
        prompts: token ids of each prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, answers: list[str]) -> None:
        self.prompts: list[list[int]] = []
        self.meter = SimpleNamespace(snapshot=DecodeTimes, times=DecodeTimes())
        self.plan, self.config = SimpleNamespace(max_model_len=4096), SimpleNamespace(block_size=256)
        self.live, self.has_work, self.drafts = SimpleNamespace(requests={}), False, None
        self._tokenizer, self._answers = tokenizer, answers

    @property
    def engine(self) -> AnswersByHeart:
        return self

    intake = engine

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    def tokenize(self, text: str, *, is_bare: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=not is_bare)

    def add_request(self, request_id: str, prompt: dict, params: SamplingParams) -> SimpleNamespace:
        self.prompts.append(prompt["prompt_token_ids"])
        text = continued(self._tokenizer.decode(self.prompts[-1]), self._answers[len(self.prompts) - 1])
        metrics = RequestMetrics(arrival_time=0.0)
        self._request = SimpleNamespace(
            request_id=request_id, params=params, is_finished=False, output=lambda: SimpleNamespace(metrics=metrics),
            sequences=[SimpleNamespace(finish_reason="stop")],
        )  # fmt: skip
        self._deltas = self._texts(text, params.skip_special_tokens)
        return self._request

    def step(self) -> list[StreamOutput]:
        delta = next(self._deltas, None)
        self._request.is_finished = delta is None
        if delta is None:
            return []
        name = self._request.request_id
        return [StreamOutput(request_id=name, index=0, text_delta=delta, token_ids_delta=[])]

    def drop(self, request_ids: list[str]) -> None:
        assert request_ids == [self._request.request_id]

    def _texts(self, text: str, skips_special: bool) -> Iterator[str]:
        token_ids, before = self._tokenizer.encode(text, add_special_tokens=False), ""
        for count in range(1, len(token_ids) + 1):
            now = self._tokenizer.decode(token_ids[:count], skip_special_tokens=skips_special)
            yield now[len(before) :]
            before = now


def continued(prompt: str, answer: str) -> str:
    """Return what a model that means `answer` writes behind a prompt which may have its first words already, and more
    line ends behind them."""
    begun = max(n for n in range(len(answer)) if prompt.rstrip("\n").endswith(answer[:n].rstrip("\n")))
    return answer[begun:]
