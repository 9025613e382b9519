"""Send requests to a server with OpenAI's API: any server, or our own in this process."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from nanoinfer.bench.exactness.comparison import NUM_LOGPROBS, Answer, token_logprobs
from nanoinfer.bench.exactness.workload import Asked, Crowd
from nanoinfer.common.errors import did_you_mean, shown

TIMEOUT_SECONDS = 600  # for one answer
# Request fields that some servers do not know, in the order in which they are left out.
_EXTRAS = ("return_token_ids", "ignore_eos", "logprobs")
_REFUSED = (400, 422)


class ServerAsker:
    """Sends requests to a server; every request of a crowd has its own connection.

    Args:
        base_url: with or without "/v1".
        model: a model name that the server offers; None: the first one.

    Attributes:
        left_out: request fields that the server refuses.

    Raises:
        ValueError: the address cannot be used, no server answers there, or the server does not offer the model.
    """

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        parts = urlsplit(base_url)
        try:
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
            self._host, self._port = parts.hostname, parts.port
        except ValueError:  # an invalid port
            is_address = False
        if not is_address:
            raise ValueError(f"--base-url {base_url!r} is no address: give one such as http://127.0.0.1:8000")
        self.base_url = base_url
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.left_out: list[str] = []
        self.model = self._served(model)

    def ask(self, crowd: Crowd) -> dict[int, Answer]:
        """Send the requests of a crowd at once. Return the answers to the compared requests, by request number.

        Raises:
            ValueError: the server refused a request, or gave no answer.
        """
        connections: list[http.client.HTTPConnection] = []
        with ThreadPoolExecutor(len(crowd)) as pool:
            try:
                connections += (self._connect() for _ in crowd)
                answers = list(pool.map(self._complete, connections, (asked for _, asked in crowd)))
            except BaseException:
                for connection in connections:  # the pool waits for requests that are under way: end their exchange
                    sock = connection.sock  # None where it has ended; its own thread closes it
                    with suppress(OSError):
                        if sock is not None:
                            sock.shutdown(socket.SHUT_RDWR)
                raise
        return {number: answer for (number, _), answer in zip(crowd, answers, strict=True) if number is not None}

    def leave_out_what_is_refused(self, asked: Asked) -> None:
        """Find out with one request which fields the server does not accept."""
        for name in (*_EXTRAS, None):
            status, answer = self._send(self._connect(), "/completions", self._body(asked))
            if status not in _REFUSED or name is None:
                break
            self.left_out.append(name)
        if status != 200:
            self.left_out.clear()
            raise ValueError(self._refusal(status, answer))

    def _complete(self, connection: http.client.HTTPConnection, asked: Asked) -> Answer:
        status, answer = self._send(connection, "/completions", self._body(asked))
        if status != 200:
            raise ValueError(self._refusal(status, answer))
        try:
            return _read(json.loads(answer))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.base_url} gave an answer of another shape: {shown(answer[:200])}") from error

    def _body(self, asked: Asked) -> dict[str, Any]:
        params = asked.params
        body = {
            "model": self.model,
            "prompt": asked.prompt,
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
        status, answer = self._send(self._connect(), "/models")
        try:
            names = [card["id"] for card in json.loads(answer)["data"]] if status == 200 else []
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.base_url} does not list its models: is it a server with OpenAI's API?") from error
        if not names and status != 404:
            raise ValueError(self._refusal(status, answer))
        if not names and model is None:
            raise ValueError(f"{self.base_url} does not list its models: give --model")
        if names and model is not None and model not in names:
            guess = did_you_mean(model, names)
            raise ValueError(f"--model {model!r} is not served at {self.base_url}{guess}: {', '.join(names[:10])}")
        return model or names[0]

    def _connect(self) -> http.client.HTTPConnection:
        """Return an open connection. It is opened early, so that all requests of a crowd are sent at one time."""
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise ValueError(f"{self.base_url} cannot be reached ({error}): start the server or correct it") from error
        return connection

    def _send(self, connection: http.client.HTTPConnection, path: str, body: dict | None = None) -> tuple[int, bytes]:
        """Return status and body of the answer to a POST of `body`, or to a GET without one."""
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body).encode())
        with closing(connection):
            try:
                connection.request(method, self._path + path, content, self._headers)
                response = connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                why = str(error) or type(error).__name__
                raise ValueError(f"{self.base_url} gave no answer ({why}): look into the server's log") from error

    def _refusal(self, status: int, answer: bytes) -> str:
        text = answer.decode(errors="replace")
        try:
            found = json.loads(text)
            found = found.get("error", found)
            text = found["message"] if isinstance(found, dict) else str(found)
        except (ValueError, LookupError, AttributeError):
            pass  # not JSON, or in another format: show the text as it is
        return f"{self.base_url} answered with status {status}: {' '.join(text.split())[:300]}"


def _read(answer: dict) -> Answer:
    choice = answer["choices"][0]
    logprobs, tokens = choice.get("logprobs") or {}, choice.get("token_ids")
    entries = logprobs.get("content")  # as in chats
    if entries is not None:
        tokens = tokens or [entry["token"] for entry in entries]
        tops = [[one["logprob"] for one in entry.get("top_logprobs") or ()] for entry in entries]
        values = [token_logprobs(entry["logprob"], top) for entry, top in zip(entries, tops, strict=True)]
        return Answer(tokens, choice["text"], logprobs=values)
    own = logprobs.get("token_logprobs")
    if own is None:
        return Answer(tokens, choice["text"])
    top = logprobs.get("top_logprobs") or [None] * len(own)
    values = [token_logprobs(one, (others or {}).values()) for one, others in zip(own, top, strict=True)]
    return Answer(tokens or logprobs.get("tokens"), choice["text"], logprobs=values)
