"""Answers in OpenAI's format, whole or as stream events; built from plain dicts, since each token writes an event."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable

from nanoinfer.outputs import Logprob, RequestOutput, StreamOutput
from nanoinfer.serve.protocol import GenerationRequest
from nanoinfer.serve.tokenizing import Prompt

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # vLLM's; JSON has no -inf
_encode = json.JSONEncoder(separators=(",", ":")).encode

Delta = tuple[int, StreamOutput]


class Answer:
    """The answer to one HTTP request; choice i * n + j is completion j of prompt i.

    Args:
        model: the model's name as the client gave it.
        prompts: (text or None, token ids) of each prompt.
        has_text: whether there is a tokenizer.
    """

    id_prefix = ""
    object_name = ""
    chunk_object_name = ""
    echoed: list[str] | None = None
    """The prompts' texts, if the client wants them in front of the completions."""

    def __init__(self, request: GenerationRequest, model: str, prompts: list[Prompt], has_text: bool) -> None:
        self.request, self.prompts, self.has_text = request, prompts, has_text
        self.n = request.n or 1
        self.head = {
            "id": f"{self.id_prefix}-{request.request_id or uuid.uuid4().hex}",
            "object": self.object_name,
            "created": int(time.time()),
            "model": model,
        }
        self._event_head = b"data: " + _encode({**self.head, "object": self.chunk_object_name})[:-1].encode()
        self._num_generated = 0
        self._num_cached = [0] * len(prompts)
        self._started: set[int] = set()  # choices that already had a delta

    # Whole

    def whole(self, outputs: list[RequestOutput]) -> bytes:
        """Return the body of the whole answer; `outputs` has one output per prompt, in order."""
        choices = []
        for place, output in enumerate(outputs):
            self._num_cached[place] = output.metrics.num_cached_tokens
            for completion in output.outputs:
                self._num_generated += len(completion.token_ids)
                index = place * self.n + completion.index
                logprobs = self.logprobs(index, completion.token_ids, completion.logprobs)
                choice = self.choice(place, index, completion.text, logprobs)
                choice["finish_reason"] = completion.finish_reason
                choice["stop_reason"] = completion.stop_reason
                if self.request.return_token_ids:
                    choice["token_ids"] = completion.token_ids
                choices.append(choice)
        body = {**self.head, "choices": choices, "usage": self.usage(), **self.extra()}
        return _encode(body).encode()

    def choice(self, place: int, index: int, text: str, logprobs: dict | None) -> dict:
        """Return one choice of the whole answer."""
        raise NotImplementedError

    def extra(self) -> dict:
        """Return further fields of the whole answer."""
        return {}

    # Streamed

    def first_events(self) -> bytes:
        """Return the events that are sent before the first token."""
        return b""

    def events(self, deltas: Iterable[Delta]) -> bytes:
        """Return one event for each delta that is not empty."""
        parts = []
        for place, output in deltas:
            self._num_generated += len(output.token_ids_delta)
            if output.finished:
                self._num_cached[place] = output.metrics.num_cached_tokens
            index = place * self.n + output.index
            is_silent = self.has_text and not output.text_delta and not output.finished and self.echoed is None
            if is_silent and not self.request.return_token_ids and output.logprobs_delta is None:
                continue  # part of a character, or of what may be a stop string
            logprobs = self.logprobs(index, output.token_ids_delta, output.logprobs_delta)
            choice = self.delta(place, index, output.text_delta, logprobs)
            choice["finish_reason"] = output.finish_reason
            if output.finished:
                choice["stop_reason"] = output.stop_reason
            if self.request.return_token_ids:
                choice["token_ids"] = output.token_ids_delta
                if index not in self._started:
                    choice["prompt_token_ids"] = self.prompts[place][1]
            self._started.add(index)
            parts.append(self._event(choice))
        return b"".join(parts)

    def last_events(self) -> bytes:
        options = self.request.stream_options
        if options is None or not options.include_usage:
            return DONE
        return self._event_head + b',"choices":[],"usage":' + _encode(self.usage()).encode() + b"}\n\n" + DONE

    def delta(self, place: int, index: int, text: str, logprobs: dict | None) -> dict:
        """Return one choice of an event."""
        raise NotImplementedError

    def _event(self, choice: dict) -> bytes:
        return self._event_head + b',"choices":[' + _encode(choice).encode() + b"]}\n\n"

    # Both

    def logprobs(self, index: int, token_ids: list[int], entries: list[dict[int, Logprob]] | None) -> dict | None:
        """Return the log-probabilities of a choice's next tokens."""
        raise NotImplementedError

    def usage(self) -> dict:
        """Count the tokens of prompts and completions. `cached_tokens` are prompt tokens found in the prefix cache."""
        num_prompt = sum(len(token_ids) for _, token_ids in self.prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_generated,
            "total_tokens": num_prompt + self._num_generated,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }


class CompletionAnswer(Answer):
    """For /v1/completions."""

    id_prefix = "cmpl"
    object_name = chunk_object_name = "text_completion"

    def __init__(self, *arguments, echoed: list[str] | None = None) -> None:
        super().__init__(*arguments)
        self.echoed = echoed
        self._offsets: dict[int, int] = {}  # by choice: characters of the tokens so far

    def choice(self, place: int, index: int, text: str, logprobs: dict | None) -> dict:
        choice = self.delta(place, index, text, logprobs)
        if self.request.return_token_ids:
            choice["prompt_token_ids"] = self.prompts[place][1]
        return choice

    def delta(self, place: int, index: int, text: str, logprobs: dict | None) -> dict:
        if self.echoed is not None and index not in self._started:
            text = self.echoed[place] + text
        return {"index": index, "text": text, "logprobs": logprobs}

    def logprobs(self, index: int, token_ids: list[int], entries: list[dict[int, Logprob]] | None) -> dict | None:
        if entries is None:
            return None
        offset = self._offsets.get(index, 0)
        result: dict[str, list] = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        for token_id, entry in zip(token_ids, entries, strict=True):
            name = _token_name(token_id, entry[token_id])
            result["text_offset"].append(offset)
            result["token_logprobs"].append(_finite(entry[token_id]))
            result["tokens"].append(name)
            result["top_logprobs"].append({_token_name(*item): _finite(item[1]) for item in entry.items()})
            offset += len(name)
        self._offsets[index] = offset
        return result


class ChatAnswer(Answer):
    """For /v1/chat/completions, which has one prompt."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def choice(self, place: int, index: int, text: str, logprobs: dict | None) -> dict:
        return {"index": index, "message": {"role": "assistant", "content": text}, "logprobs": logprobs}

    def extra(self) -> dict:
        return {"prompt_token_ids": self.prompts[0][1]} if self.request.return_token_ids else {}

    def first_events(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            self._event({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(self.n)
        )

    def delta(self, place: int, index: int, text: str, logprobs: dict | None) -> dict:
        return {"index": index, "delta": {"content": text}, "logprobs": logprobs}

    def logprobs(self, index: int, token_ids: list[int], entries: list[dict[int, Logprob]] | None) -> dict | None:
        if entries is None:
            return None
        top = self.request.num_logprobs
        return {
            "content": [
                _chat_logprob(token_id, entry[token_id])
                | {"top_logprobs": [_chat_logprob(*item) for item in list(entry.items())[:top]]}
                for token_id, entry in zip(token_ids, entries, strict=True)
            ]
        }


def _token_name(token_id: int, logprob: Logprob) -> str:
    """Return the token's text; without a tokenizer, the name that vLLM gives to the token."""
    return f"token_id:{token_id}" if logprob.decoded_token is None else logprob.decoded_token


def _finite(logprob: Logprob) -> float:
    return max(_LOWEST_LOGPROB, logprob.logprob)


def _chat_logprob(token_id: int, logprob: Logprob) -> dict:
    name = _token_name(token_id, logprob)
    return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}
