"""Prompts in the forms that vLLM accepts, and their conversion to token ids."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nanoinfer.common.errors import RequestError, shown

TokenIds = Sequence[int] | range | np.ndarray | torch.Tensor
Prompt = str | TokenIds | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
LONG_CHARS = 20_000  # about 20 ms of work
_READ_FIRST = 8  # characters for each token that a prompt may have: of prose and code a token has 3 to 5
_FORMS = 'text, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}'

# Kinds of parts of a message that are text, by the field that has it: those of OpenAI's two APIs.
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Parameters of `apply_chat_template` and of the functions that it calls.
NO_VARIABLES = frozenset(
    "self tokenizer messages conversation conversations compiled_template chat_template add_generation_prompt "
    "continue_final_message tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask tokenizer_kwargs tools documents".split()
)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list.

    Raises:
        ValueError: `prompts` is neither a prompt nor a list.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    plain = _plain_ids(prompts)
    if not isinstance(plain, list | tuple):
        raise ValueError(f"prompts is a {type(prompts).__name__}: give text, a list of token ids, or a list of such")
    return [plain] if isinstance(prompts, range) or plain and isinstance(plain[0], numbers.Number) else list(plain)


def unpack(prompt: Prompt) -> str | list[int]:
    """Return the text or the token ids of a prompt in any of its forms. If a dict has both, the token ids count.

    The ids themselves are not checked.

    Raises:
        RequestError: the prompt has none of these forms.
    """
    if isinstance(prompt, Mapping):
        given = {name: value for name, value in prompt.items() if value is not None}
        if not given or not given.keys() <= {"prompt", "prompt_token_ids"}:
            images = "images are not supported, " if "multi_modal_data" in given else ""
            raise RequestError(f"the prompt is a dict with {shown(list(given))}: {images}give {_FORMS}", field="prompt")
        if "prompt_token_ids" in given:
            prompt = _plain_ids(given["prompt_token_ids"])
            if not isinstance(prompt, list | tuple):
                raise RequestError(f"prompt_token_ids is {shown(prompt)}: give a list of token ids", field="prompt")
        elif not isinstance(prompt := given["prompt"], str):
            raise RequestError(f"the prompt's text is {shown(prompt)}: give {_FORMS}", field="prompt")
    plain = _plain_ids(prompt)
    if isinstance(plain, str):
        return plain
    if not isinstance(plain, list | tuple):
        raise RequestError(f"the prompt is a {type(prompt).__name__}: give {_FORMS}", field="prompt")
    return list(plain)


def encode(tokenizer: PreTrainedTokenizerBase | None, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the token ids of a text, as the tokenizer's `encode` does.

    That makes offsets and masks, too, and holds Python's lock while it frees them: not so here, where a text is long.

    Raises:
        RequestError: there is no tokenizer, or it cannot read the text.
    """
    if tokenizer is None:
        message = "the prompt is text, but there is no tokenizer: give one with tokenizer=..., or give token ids"
        raise RequestError(message, field="prompt")
    try:
        if len(text) <= LONG_CHARS or not _is_plain(type(tokenizer)):
            return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
        tokenizer.encode("")  # sets what is cut, padded and special, as whoever used it last may have set it otherwise
        (found,) = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids
    except Exception as error:  # the tokenizer's library may raise anything
        raise RequestError(f"the tokenizer cannot read the prompt: {error}", field="prompt") from error


def _is_plain(kind: type) -> bool:
    """Whether texts are encoded by the library alone."""
    names, plain = ("encode", "_encode_plus"), PreTrainedTokenizerFast
    return issubclass(kind, plain) and all(getattr(kind, name) is getattr(plain, name) for name in names)


def encode_within(
    tokenizer: PreTrainedTokenizerBase | None, text: str, max_model_len: int, *, is_bare: bool = False
) -> list[int]:
    """Return the token ids of a text, with special tokens around them unless it `is_bare`.

    Of a very long text the beginning is encoded first. What follows changes only the tokens where it ends, so the text
    is too long if they are half as many again as there may be.

    Raises:
        RequestError: as `encode`; or the beginning says that it has `max_model_len` tokens or more.
    """
    size = max(LONG_CHARS, _READ_FIRST * max_model_len)
    while size < len(text):
        if (num_tokens := len(encode(tokenizer, text[:size]))) > 1.5 * max_model_len:
            what = f"at least {num_tokens} tokens in {size} of its {len(text)} characters"
            raise too_long(what, num_tokens, max_model_len)
        size *= 2
    return encode(tokenizer, text, add_special_tokens=not is_bare)


def renders_first(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether the chat template makes a text, which is then tokenised like any other text."""
    renders = getattr(type(tokenizer), "apply_chat_template", None)
    return renders is PreTrainedTokenizerBase.apply_chat_template


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any] | None = None,
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    tokenize: bool = True,
) -> list[int] | str:
    """Return the token ids of a conversation, through the tokenizer's chat template.

    Args:
        messages: as `conversation` returns them.
        variables: variables of the template, such as `enable_thinking`; the user chooses the names.
        tools: that the model may call, in OpenAI's form, for the template to describe.
        continue_final_message: leave the last message open, for the answer to go on with; then there is no generation
            prompt.
        chat_template: in place of the tokenizer's, in Jinja.
        tokenize: False returns the text, whose tokens, without special tokens around it, are these ids.

    Raises:
        RequestError: there is no template, it refuses the messages, or a variable has the name of a parameter.
    """
    if not isinstance(variables, Mapping | None):
        raise RequestError(
            f"chat_template_kwargs is {shown(variables)}: give a dict with variables of the chat template",
            field="chat_template_kwargs",
        )
    for name in variables or ():
        if not isinstance(name, str) or name in NO_VARIABLES:
            raise RequestError(
                f"chat_template_kwargs may not set {shown(name)}, which the engine does: leave it out, give variables "
                "of the chat template's own",
                field="chat_template_kwargs",
            )
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message=True goes on with the last message, add_generation_prompt=True begins another: "
            "set add_generation_prompt=False",
            field="continue_final_message",
        )
    if tokenizer is None or not (chat_template or getattr(tokenizer, "chat_template", None)):
        missing, remedy = "chat needs a chat template, but there is no tokenizer", ""
        if tokenizer is not None:
            missing, remedy = "the tokenizer has no chat template", "give a file with chat_template=..., or "
        raise RequestError(
            f"{missing}: {remedy}have a text continued (generate(), /v1/completions)",
            field="messages",
        )
    wanted = dict(add_generation_prompt=add_generation_prompt, tokenize=tokenize, return_dict=False)
    wanted |= dict(continue_final_message=continue_final_message, chat_template=chat_template)
    wanted |= {} if not tools else dict(tools=tools)
    try:
        found = tokenizer.apply_chat_template(messages, **wanted, **(variables or {}))
    except Exception as error:  # a template is a program from the checkpoint and may raise anything
        raise RequestError(f"the chat template refuses the messages: {error}", field="messages") from error
    return list(found) if tokenize else found


def too_long(what: str, num_tokens: int, max_model_len: int) -> RequestError:
    """Return the error for a prompt that has `what`, such as "9000 tokens", which are `num_tokens` or more."""
    return RequestError(
        f"the prompt is too long: {what}, and max_model_len={max_model_len} leaves room for {max_model_len - 1}. "
        "Shorten it or raise max_model_len",
        field="prompt",
        is_too_long=True,
        lengths=(num_tokens, max_model_len - 1),
    )


def conversation(messages: Any) -> list[dict[str, Any]]:
    """Return the checked messages. Text parts are joined by line ends, as in vLLM; null content is "".

    Raises:
        RequestError: `messages` is not a list of messages or is empty, or a message has something other than a role and
            text.
    """
    if not isinstance(messages, list | tuple):
        raise RequestError(
            f"messages is {shown(messages)}: give a list of {{'role': ..., 'content': ...}}", field="messages"
        )
    if not messages:
        raise RequestError("messages is empty: give at least one message", field="messages")
    return [_plain_message(f"messages[{place}]", message) for place, message in enumerate(messages)]


def _plain_message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f'{where} has no role: give "system", "user" or "assistant"', field="messages")
    content = message.get("content")
    if content is None and ("content" in message or message["role"] == "assistant"):
        content = ""
    if isinstance(content, list):
        texts = [_text_of(part) for part in content]
        for part, text in zip(content, texts, strict=True):
            if text is None:
                raise RequestError(_refusal(where, part), field="messages")
        content = "\n".join(texts)
    if not isinstance(content, str):
        raise RequestError(f"{where}.content is {shown(content)}: give text or a list of text parts", field="messages")
    return {**{name: value for name, value in message.items() if value is not None}, "content": content}


def _refusal(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind not in _TEXTS:
        others = "images are not supported, " if "image" in kind else ""
        return f"{where}.content has a part of type {shown(kind)}: {others}only text is supported"
    return f'{where}.content has a part that is no {{"type": "text", "text": ...}}: only text is supported'


def _text_of(part: Any) -> str | None:
    """Return the text of a part; None: it is none of text."""
    kind = ("text" if part.get("type") is None else part["type"]) if isinstance(part, dict) else None
    text = part.get(_TEXTS[kind]) if isinstance(kind, str) and kind in _TEXTS else None
    return text if isinstance(text, str) else None


def _plain_ids(ids: Any) -> Any:
    """Convert arrays, tensors and ranges to lists; return everything else unchanged."""
    if isinstance(ids, np.ndarray | torch.Tensor):
        return ids.tolist()
    if isinstance(ids, list | tuple) and any(isinstance(token_id, np.integer) for token_id in ids):
        return [token_id.item() if isinstance(token_id, np.integer) else token_id for token_id in ids]
    return list(ids) if isinstance(ids, range) else ids
