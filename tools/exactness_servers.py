"""Send requests to a server with OpenAI's API: any server, or our own in this process."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import httpx
from exactness_comparison import NUM_LOGPROBS, Answer, token_logprobs
from exactness_workload import Crowd

from nanoinfer.common.errors import did_you_mean, shown
from nanoinfer.sampling_params import SamplingParams

TIMEOUT_SECONDS = 600  # for one answer
# Request fields that some servers do not know, in the order in which they are left out.
_EXTRAS = ("return_token_ids", "ignore_eos", "logprobs")
_REFUSED = (400, 422)


class ServerAsker:
    """Sends requests to a server.

    Args:
        base_url: with or without "/v1".
        model: a model name that the server offers; None: the first one.

    Attributes:
        left_out: request fields that the server refuses.

    Raises:
        ValueError: the address cannot be used, no server answers there, or the server does not offer the model.
    """

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        try:
            url = httpx.URL(base_url)
        except httpx.InvalidURL:
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host:
            raise ValueError(f"--base-url {base_url!r} is no address: give one such as http://127.0.0.1:8000")
        self.base_url = base_url
        self._settings: dict[str, Any] = dict(
            base_url=url.copy_with(path=url.path.rstrip("/").removesuffix("/v1") + "/v1"),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            limits=httpx.Limits(max_connections=None),
            timeout=TIMEOUT_SECONDS,
            trust_env=False,  # no proxy between
            verify=ssl.create_default_context(),
        )
        self.left_out: list[str] = []
        self.model = self._served(model)

    def ask(self, crowd: Crowd) -> dict[int, Answer]:
        """Send the requests of a crowd at once. Return the answers to the compared requests, by request number.

        Raises:
            ValueError: the server refused a request, or gave no answer.
        """
        responses = self._send("completions", [self._body(*request) for _, *request in crowd])
        answers = [self._read(response) for response in responses]
        return {number: answer for (number, *_), answer in zip(crowd, answers, strict=True) if number is not None}

    def leave_out_what_is_refused(self, prompt: list[int], params: SamplingParams) -> None:
        """Find out with one request which fields the server does not accept."""
        for name in (*_EXTRAS, None):
            (response,) = self._send("completions", [self._body(prompt, params)])
            if response.status_code not in _REFUSED or name is None:
                break
            self.left_out.append(name)
        if response.status_code != 200:
            self.left_out.clear()
            raise ValueError(self._refusal(response))

    def _send(self, path: str, bodies: list[dict | None]) -> list[httpx.Response]:
        """POST the bodies, or GET for None, all at once. An error without an answer, or Ctrl-C, ends all of them."""

        async def exchange() -> list[httpx.Response]:
            async with httpx.AsyncClient(**self._settings) as client:
                requests = [client.request("GET" if body is None else "POST", path, json=body) for body in bodies]
                return await asyncio.gather(*requests)

        try:
            return asyncio.run(exchange())
        except httpx.ConnectError as error:
            why = _origin(error)
            raise ValueError(f"{self.base_url} cannot be reached ({why}): start the server or correct it") from error
        except httpx.HTTPError as error:
            why = str(error) or type(error).__name__
            raise ValueError(f"{self.base_url} gave no answer ({why}): look into the server's log") from error

    def _read(self, response: httpx.Response) -> Answer:
        if response.status_code != 200:
            raise ValueError(self._refusal(response))
        try:
            return _answer(response.json()["choices"][0])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            said = shown(response.content[:200])
            raise ValueError(f"{self.base_url} gave an answer of another shape: {said}") from error

    def _body(self, prompt: list[int], params: SamplingParams) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "ignore_eos": True,
            "return_token_ids": True,
            "logprobs": NUM_LOGPROBS,
        }
        if params.seed is not None:
            body["seed"] = params.seed
        return {name: value for name, value in body.items() if name not in self.left_out}

    def _served(self, model: str | None) -> str:
        (response,) = self._send("models", [None])
        try:
            names = [card["id"] for card in response.json()["data"]] if response.status_code == 200 else []
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.base_url} does not list its models: is it a server with OpenAI's API?") from error
        if not names and response.status_code != 404:
            raise ValueError(self._refusal(response))
        if not names and model is None:
            raise ValueError(f"{self.base_url} does not list its models: give --model")
        if names and model is not None and model not in names:
            guess = did_you_mean(model, names)
            raise ValueError(f"--model {model!r} is not served at {self.base_url}{guess}: {', '.join(names[:10])}")
        return model or names[0]

    def _refusal(self, response: httpx.Response) -> str:
        text = response.text
        try:
            found = response.json()
            found = found.get("error", found)
            text = found["message"] if isinstance(found, dict) else str(found)
        except (ValueError, LookupError, AttributeError):
            pass  # not JSON, or in another format: show the text as it is
        return f"{self.base_url} answered with status {response.status_code}: {' '.join(text.split())[:300]}"


def _origin(error: BaseException) -> BaseException:
    """Return the error that `error` began with: what the libraries make of it says only that all attempts failed."""
    while inner := error.__cause__ or error.__context__:
        error = inner
    return error.exceptions[-1] if isinstance(error, BaseExceptionGroup) else error  # one for each address of a name


def _answer(choice: dict) -> Answer:
    logprobs, tokens = choice.get("logprobs") or {}, choice.get("token_ids")
    if logprobs.get("content") is not None:  # as in chats
        entries = logprobs["content"]
        tokens = tokens or [entry["token"] for entry in entries]
        own = [entry["logprob"] for entry in entries]
        tops = [[one["logprob"] for one in entry.get("top_logprobs") or ()] for entry in entries]
    elif logprobs.get("token_logprobs") is not None:
        own, tokens = logprobs["token_logprobs"], tokens or logprobs.get("tokens")
        tops = [(top or {}).values() for top in logprobs.get("top_logprobs") or [None] * len(own)]
    else:
        return Answer(tokens, choice["text"])
    values = [token_logprobs(one, others) for one, others in zip(own, tops, strict=True)]
    return Answer(tokens, choice["text"], logprobs=values)
