"""What users import: vLLM's `LLM`, with KV offload to host memory."""

from __future__ import annotations

import inspect
import itertools
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from nanoinfer.common.errors import UnknownNameError, did_you_mean, nearest, shown
from nanoinfer.common.other_names import MEANT
from nanoinfer.common.units import counted
from nanoinfer.common.unsupported import CHAT, GENERATE, MISSING_METHODS, Table, supported
from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.engine.stats import run_line
from nanoinfer.outputs import RequestOutput, StreamOutput
from nanoinfer.parallel.script import Script, together, together_in_turns
from nanoinfer.parsers.answer_format import PROMPT_END_TOKENS, AnswerFormat
from nanoinfer.parsers.tools import checked_tools
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.requests.prompts import Prompt, as_list, conversation
from nanoinfer.requests.request import Request
from nanoinfer.requests.stream import RequestStream
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.tokenizer_files import load_tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None
Progress = bool | Callable[..., tqdm]


class LLM:
    """An LLM with its KV cache on the GPU ("resident") or in host memory ("offload").

    Args:
        model: local directory of a Hugging Face checkpoint, or a hub id.
        arguments: the fields of `nanoinfer.EngineConfig`, such as `enable_cpu_offload`, `gpu_memory_limit`,
            `host_memory_limit`, `max_model_len`, `dtype` or `device`.

    Raises:
        UnknownNameError (a TypeError and ValueError): an argument does not exist; the message names the nearest one.
        ValueError: a value is not allowed, the checkpoint cannot be used, or memory limits are too small.

    Several LLMs can live in one process. Only one thread at a time may call an LLM; another one gets a RuntimeError.
    """

    def __init__(self, model: str | Path, **arguments: Any) -> None:
        self._engine: LLMEngine | None = None
        self._script = Script.begun(arguments.get("tensor_parallel_size", 1))
        self._config = EngineConfig(model=model, **arguments)
        self._start(self._config)

    @together
    def _start(self, config: EngineConfig) -> None:
        self._engine = LLMEngine(config)
        self._new_ids = map(str, itertools.count())
        self._streams: dict[str, RequestStream] = {}  # of each request, whoever runs the step
        if self.engine.config.progress_bar:
            self._report(self.engine.plan.one_line(self.mode))
            if self.engine.runner.graph_memory is not None and self.engine.runner.graph_memory[0]:
                before, after = (num_bytes / 2**30 for num_bytes in self.engine.runner.graph_memory)
                self._report(f"GPU memory in use {before:.2f} GiB before graph capture, {after:.2f} GiB after")

    @property
    def engine(self) -> LLMEngine:
        """The engine that runs the requests, for use step by step."""
        if self._engine is None:
            if self._script is not None and self._script.rank:
                raise RuntimeError(
                    f"this process is rank {self._script.rank} of a script, and rank 0's has the engine: call the LLM"
                )
            raise RuntimeError("this LLM is closed: make a new one")
        return self._engine

    @property
    def llm_engine(self) -> LLMEngine:
        """vLLM's name of `engine`."""
        return self.engine

    def __getattr__(self, name: str) -> Any:
        if name in MISSING_METHODS:
            raise AttributeError(f"LLM.{name} of vLLM is not there: {MISSING_METHODS[name]}")
        names = [one for one in dir(type(self)) if not one.startswith("_")]
        raise AttributeError(f"LLM has no {name}{did_you_mean(name, names)}")

    @property
    @together
    def mode(self) -> str:
        """ "resident" or "offload"."""
        return self.engine.mode

    @together
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt.

        Args:
            prompts: one prompt or a list of prompts. Each is text, token ids (a list, array, tensor or range), or
                vLLM's {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: one for all prompts, or a list with one for each; None: `get_default_sampling_params()`.
            use_tqdm: show progress; a callable is called like `tqdm`, with `total` and `desc`, and gives the bar.
            unsupported: arguments of vLLM that this engine does not support, such as `lora_request`. Only values that
                turn the feature off are accepted.

        Returns:
            One output per prompt, in the order of the prompts.

        If a completion fails while it runs, only this one ends: it has `finish_reason="error"`, the request's output
        gives the reason in `error`, and a warning names the request. If all fail, the first's exception is raised.

        Raises:
            ValueError: a prompt, its parameters or an argument cannot be used. No prompt runs then.
        """
        _refuse(unsupported, GENERATE, LLM.generate)
        prompts = as_list(prompts)
        params = self._one_each(sampling_params, len(prompts))
        token_ids = []
        for place, prompt in enumerate(prompts):
            with _naming(place, len(prompts)):
                token_ids.append(self.engine.intake.tokenize(prompt))
        ids = [next(self._new_ids) for _ in prompts]
        requests = []
        with self.engine.alone():
            before = self.engine.meter.snapshot()
            try:
                for place, (request_id, *arguments) in enumerate(zip(ids, prompts, params, token_ids, strict=True)):
                    with _naming(place, len(prompts)):
                        requests.append(self.engine.add_request(request_id, *arguments))
                self._run(requests, use_tqdm)
                if use_tqdm and self.engine.config.progress_bar:
                    self._report(run_line(self.engine, before))
            finally:
                for request_id in ids:
                    self.engine.abort(request_id)  # requests that an exception left behind
        failed = [(place, request) for place, request in enumerate(requests) if request.failure is not None]
        if failed and all(len(request.failures) == len(request.sequences) for request in requests):
            raise failed[0][1].failure
        for place, request in failed:
            warnings.warn(f"prompt {place} of {len(requests)} failed: {request.error}", stacklevel=3)
        return [request.output() for request in requests]

    def _report(self, text: str) -> None:
        print(f"nanoinfer: {text}", file=sys.stderr)

    def _run(self, requests: list[Request], use_tqdm: Progress) -> None:
        """Run steps until all `requests` have ended."""
        running = {request.request_id: request for request in requests}
        make_bar = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with closing(make_bar(total=len(requests), desc="prompts")) as bar:
            while running and self.engine.has_work:
                for output in self._step(requests):
                    if output.finished and output.request_id in running and running[output.request_id].is_finished:
                        del running[output.request_id]
                        bar.update(1)

    @together_in_turns
    def generate_stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> Iterator[StreamOutput]:
        """Complete prompts and yield what each completion gained, as soon as it is known.

        If a prompt cannot be used, or its step fails, only this prompt ends: its last output has
        `finish_reason="error"` and gives the reason in `error`. `request_id` is the name of the prompt for `abort`:
        "0", "1", ..., counted over the life of the LLM. Several streams may be read in turns, and `generate` may be
        called in between: each stream gets all of its own outputs.
        """
        prompts = as_list(prompts)
        params = self._one_each(sampling_params, len(prompts))
        unread: deque[StreamOutput] = deque()
        ids = [next(self._new_ids) for _ in prompts]
        streams: list[RequestStream] = []
        try:
            for request_id, prompt, param in zip(ids, prompts, params, strict=True):
                try:
                    request = self.engine.add_request(request_id, prompt, param)
                except ValueError as error:
                    refused = dict(text_delta="", token_ids_delta=[], finished=True, finish_reason="error")
                    unread.append(StreamOutput(request_id=request_id, index=0, **refused, error=str(error)))
                    continue
                streams.append(RequestStream(request, unread))
                self._streams[request_id] = streams[-1]
            while unread or any(stream.open for stream in streams):
                if unread:
                    yield unread.popleft()
                elif self.engine.has_work:
                    self._step()
                else:
                    return  # the requests were ended directly in the engine
        finally:
            # By id: an interrupt may come between a request and its entry in `streams`. A stream may be left anywhere,
            # by the garbage collector, too: on another thread, and in the midst of a step.
            if self._engine is not None:
                self._engine.drop(ids)
            for request_id in ids:
                self._streams.pop(request_id, None)

    @together
    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: Params = None,
        use_tqdm: Progress = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        **unsupported: Any,
    ) -> list[RequestOutput]:
        """Complete conversations through the tokenizer's chat template.

        Args:
            messages: one conversation, which is a list of {"role": ..., "content": ...}, or a list of conversations.
                The content is text or a list of text parts; an assistant's content may be None.
            use_tqdm, unsupported: as in `generate`.
            continue_final_message: go on with the last message; give add_generation_prompt=False with it.
            chat_template: in place of the tokenizer's, in Jinja.
            chat_template_kwargs: variables of the template, such as {"enable_thinking": False}.
            tools: in OpenAI's form, which the template shows to the model. Its calls come as text.

        Raises:
            ValueError: there is no tokenizer, it has no chat template, or the template refuses the messages; or a name
                in `chat_template_kwargs` is a parameter of `apply_chat_template` and no variable.
        """
        _refuse(unsupported, CHAT, LLM.chat)
        are_many = isinstance(messages, list | tuple) and messages and isinstance(messages[0], list | tuple)
        form = AnswerFormat.of_tokenizer(self.engine.tokenizer, chat_template)
        template = ChatTemplate(self.engine.tokenizer, form, chat_template)
        if tools:
            checked_tools(tools)
        how = dict(add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message)
        prompts, conversations = [], messages if are_many else [messages]
        for place, one in enumerate(conversations):
            with _naming(place, len(conversations)):
                templated = partial(template.encode, conversation(one), chat_template_kwargs, tools=tools, **how)
                prompts.append(self.engine.intake.tokenize_chat(templated))
        params = self._one_each(sampling_params, len(prompts))
        for place, (one, prompt) in enumerate(zip(params, prompts, strict=True)):
            if (asked := one.structured_outputs) is not None:
                end = self.engine.tokenizer.decode(prompt[-PROMPT_END_TOKENS:])
                before = form.form_grammar(end, only_if_begun=True)
                params[place] = replace(one, structured_outputs=asked.behind(before))
        return self.generate(prompts, params, use_tqdm)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of transformers.

        Raises:
            ValueError: there is no tokenizer.
        """
        if self._script is not None and self._script.rank:
            tokenizer = load_tokenizer(self._config, read_checkpoint(self._config.model, self._config.hf_overrides))
        else:
            tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ValueError("there is no tokenizer: give one with tokenizer=..., and leave skip_tokenizer_init out")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the checkpoint's generation_config.json recommends.

        With `generation_config="vllm"`: the defaults of SamplingParams.
        """
        return SamplingParams(**self._sampling_defaults())

    @together
    def _sampling_defaults(self) -> dict[str, Any]:
        return self.engine.sampling_defaults

    @together
    def abort(self, request_id: str) -> bool:
        """End a request, for example between two outputs of `generate_stream`; return False if it is not running.

        The last output of the request's stream has `finish_reason="abort"`.
        """
        was_there = self.engine.abort(request_id)
        if stream := self._streams.get(request_id):
            stream.end_aborted()
        return was_there

    @together
    def switch_mode(self, mode: str) -> None:
        """Switch to "offload" or "resident" mode. This is allowed between the outputs of a running stream, too.

        The output of running requests does not change by one bit.

        Raises:
            ValueError: there is no such mode, or the running requests do not fit into the other pool. Nothing changes
                then.
        """
        self.engine.switch_mode(mode)

    @together
    def stats(self) -> dict[str, int | float | str | list[str]]:
        """Return counters since the start, and the state of both pools; see `LLMEngine.stats`."""
        return self.engine.stats()

    def close(self) -> None:
        """Free device and host memory now instead of when the LLM is garbage-collected. May be called again."""
        if self._script is not None:
            self._script.leave()
            self._script = None
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _step(self, requests: Sequence[Request] = ()) -> list[StreamOutput]:
        """Run a step, hand its outputs to the streams that they belong to, and return them.

        Raises:
            Exception: the step failed and ended one of `requests`, or it ended no stream's request. A failure that
                ended only requests of streams is not raised: those streams yield an output with the error.
        """
        try:
            outputs = self.engine.step()
        except BaseException as error:
            # The next step returns the outputs that were read before the failure.
            num_ended = sum(stream.end_aborted(error) for stream in list(self._streams.values()))
            is_mine = any(s.finish_reason == "abort" for request in requests for s in request.sequences)
            if is_mine or not num_ended or not isinstance(error, Exception):
                raise
            return []
        for output in outputs:
            if stream := self._streams.get(output.request_id):
                stream.put(output)
        return outputs

    def _one_each(self, params: Params, count: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * count
        if not isinstance(params, list | tuple):
            raise ValueError(
                f"sampling_params is a {type(params).__name__}: give SamplingParams(...) or a list of them"
            )
        params = list(params)
        if len(params) != count:
            raise ValueError(
                f"{len(params)} sampling_params for {counted(count, 'prompt')}: give one, or one for each prompt"
            )
        for param in params:
            if not isinstance(param, SamplingParams):
                raise ValueError(f"sampling_params holds a {type(param).__name__}: give SamplingParams(...)")
        return params


@contextmanager
def _naming(place: int, count: int) -> Iterator[None]:
    """Add the number of the prompt to a ValueError if there are several prompts."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"prompt {place} of {count}: {error}" if count > 1 else str(error)) from error


def _refuse(unsupported: dict[str, Any], table: Table, method: Callable) -> None:
    """Raise ValueError if a keyword is unknown or asks for a feature that this engine does not have."""
    known = {field.name for field in fields(SamplingParams)}
    ours = {name: nearest(name, known) if name in MEANT and name not in known else name for name in unsupported}
    if sampling := {ours[name]: value for name, value in unsupported.items() if ours[name] in known}:
        given = ", ".join(f"{name}={shown(value)}" for name, value in sampling.items())
        what = "messages" if method.__name__ == "chat" else "prompts"
        raise UnknownNameError(
            f"{method.__name__} takes {' and '.join(sampling)} inside sampling parameters: "
            f"llm.{method.__name__}({what}, SamplingParams({given}))"
        )
    allowed = [name for name in inspect.signature(method).parameters if name not in ("self", "unsupported")]
    supported(unsupported, table, allowed, method.__name__)
