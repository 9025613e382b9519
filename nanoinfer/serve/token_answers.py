"""The answers of /tokenize, /detokenize and /v1/messages/count_tokens.

They are made on a tokenizer thread, because large answers take seconds. One call of the `json` module holds Python's
lock on any thread, which also blocks the event loop. So values that may be long are written piece by piece.
"""

from __future__ import annotations

import json

from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.tools import checked_tools
from nanoinfer.requests.chats import ChatTemplate
from nanoinfer.requests.prompts import encode
from nanoinfer.serve.protocol import ChatRequest, DetokenizeRequest, TokenizeRequest
from nanoinfer.serve.tokenizing import PromptTokenizer
from nanoinfer.serve.tool_use import ToolUse

MAX_TOKENIZING_BYTES = 4 * 2**20
_PIECE = 16_384  # ids or characters, about a millisecond of work


def tokenized(asked: TokenizeRequest, prompts: PromptTokenizer, template: ChatTemplate) -> bytes:
    """Return the token ids of a text or a conversation; their number is not limited."""
    tokenizer = prompts.tokenizer
    if asked.messages is not None:
        if asked.tools is not None:
            checked_tools(asked.tools)
        tokens = template.encode(asked.conversation(), **asked.template_arguments, tools=asked.tools)
    else:
        tokens = encode(tokenizer, asked.prompt, add_special_tokens=asked.add_special_tokens is not False)
    strs = json_bytes(tokenizer.convert_ids_to_tokens(tokens)) if asked.return_token_strs else b"null"
    parts = (len(tokens), prompts.max_model_len, json_bytes(tokens), strs)
    return b'{"count":%d,"max_model_len":%d,"tokens":%s,"token_strs":%s}' % parts


def counted(asked: ChatRequest, prompts: PromptTokenizer, template: ChatTemplate) -> bytes:
    """Return how many tokens a conversation has, in the form of Anthropic's API."""
    arguments = ToolUse.of(asked, template.form).template_arguments(asked, template.form)
    tokens = template.encode(asked.conversation(), **arguments)
    return b'{"input_tokens":%d}' % len(tokens)


def detokenized(asked: DetokenizeRequest, prompts: PromptTokenizer, template: ChatTemplate) -> bytes:
    """Return the text of token ids, special tokens included."""
    if prompts.tokenizer is None:
        raise RequestError("there is no tokenizer: start the server with one", field="prompt")
    prompts.intake.check_vocabulary(asked.tokens)
    return b'{"prompt":' + json_bytes(prompts.tokenizer.decode(asked.tokens)) + b"}"


def json_bytes(value: list | str) -> bytes:
    """Return the value as JSON, written piece by piece."""
    pieces = [value[start : start + _PIECE] for start in range(0, len(value), _PIECE)]
    encoded = [json.dumps(piece, ensure_ascii=False, separators=(",", ":"))[1:-1].encode() for piece in pieces]
    return b'"%s"' % b"".join(encoded) if isinstance(value, str) else b"[%s]" % b",".join(encoded)
