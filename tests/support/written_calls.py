"""Answers that call tools, as the chat templates of published models write them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken
from trained_tokenizers import make_tokenizer

from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.events import Message
from nanoinfer.parsers.tools import Tool

TEMPLATES = Path(__file__).resolve().parents[1] / "chat" / "templates"
# As Llama 3.1's: the call is all of an answer.
LLAMA3 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
    "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    '{{ \'{"name": "\' + call.name + \'", "parameters": \' }}{{ call.arguments | tojson }}{{ "}" }}'
    "{% else %}{{ message.content }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# As LFM2.5's thinking models have it, and as LFM2's, whose templates write no calls. Texts stand there as they are.
_LFM2 = (
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\nList of tools: [' + (tools | map('tojson') | join(', ')) + ']"
    "<|im_end|>\n' }}{% endif %}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.thinking is defined %}{{ '<think>' + message.thinking + '</think>' }}{% endif %}"
    "{{ message.content }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LFM2 = _LFM2.replace("CALLS", "")
LFM2_5 = _LFM2.replace(
    "CALLS",
    "{% if message.tool_calls %}<|tool_call_start|>[{% for call in message.tool_calls %}"
    "{{ call.function.name }}({% for key, value in call.function.arguments.items() %}"
    """{{ key }}={% if value is string %}'{{ value }}'{% else %}"""
    "{{ value | tojson if value is mapping else value | string }}{% endif %}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]<|tool_call_end|>{% endif %}",
)


# As Qwen3.5's: thinking, which the prompt begins or says is done, and calls with a tag for each argument.
QWEN3_5 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}"
    "<think>\n{{ message.reasoning_content or '' }}\n</think>\n\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ '\\n' if not loop.first else '\\n\\n' if message.content else '' }}"
    "<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for name, value in call.function.arguments | items %}<parameter={{ name }}>\n"
    "{{ value if value is string else value | tojson | safe }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}{% else %}{{ message.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{{ '' if enable_thinking else '\\n</think>\\n\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Style:
    """How a model writes.

    Attributes:
        parser: the name of its parser.
        ends: texts of tokens that end an answer; the engine leaves them out.
        has_content: whether text may stand before calls.
        quotes_keys: whether keys within arguments may be any text.
        thinks: whether the template is told to have the model think; else it writes in the prompt that it has.
        escapes: whether the template writes texts so that any can be read.
    """

    template: str
    parser: str
    ends: tuple[str, ...]
    max_calls: int = 3
    has_content: bool = True
    quotes_keys: bool = True
    thinks: bool = False
    escapes: bool = True

    def text(self) -> str:
        own = {"llama3": LLAMA3, "lfm2.5": LFM2_5, "qwen3.5": QWEN3_5}
        return own.get(self.template) or (TEMPLATES / f"{self.template}.jinja").read_text()


STYLES = {
    "Qwen2.5": Style("Qwen-Qwen2.5-7B-Instruct", "hermes", ("<|im_end|>\n",)),
    "Qwen3": Style("Qwen-Qwen3-0.6B", "hermes", ("<|im_end|>\n",)),
    "granite-4": Style("ibm-granite-granite-4.0", "hermes", ("<|end_of_text|>\n",)),
    "Qwen3-Coder": Style("Qwen3-Coder", "qwen3_coder", ("<|im_end|>\n",)),
    "Qwen3.5": Style("qwen3.5", "qwen3_coder", ("<|im_end|>\n",)),
    "Seed-OSS": Style("ByteDance-Seed-OSS", "seed_oss", ("<seed:eos>",)),
    "GLM-4.6": Style("GLM-4.6", "glm45", ()),
    "Gemma-4": Style(
        "google-gemma-4-31B-it", "gemma4", ("<|tool_response>",), has_content=False, quotes_keys=False, thinks=True
    ),
    "Llama-3": Style("llama3", "llama3_json", ("<|eot_id|>",), max_calls=1, has_content=False),
    "Mistral-Small": Style("Mistral-Small-3.2-24B-Instruct-2506", "mistral", ("</s>",), has_content=False),
    "Mistral-Nemo": Style("mistralai-Mistral-Nemo-Instruct-2407", "mistral", ("</s>",), has_content=False),
    "Ministral-3": Style("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", ("</s>",)),
    "LFM2.5": Style("lfm2.5", "lfm2", ("<|im_end|>\n",), escapes=False),
    "gpt-oss": Style("openai-gpt-oss-120b", "openai", ("<|call|>",), max_calls=1, has_content=False),
}
_WORDS = (
    "the", "a cat", "naïve", "漢字", "🦊", "\n", "\n\n", "  ", '"', "\\", "'", "{", "}", "[1, 2", "\t", "<|x|>",
    "[TOOL", "null", "5", ";", "€", "\\u00e9", "def f():", "<b>", "<tool_call>", "</tool_call>", "<function",
    "</parameter> so", "</arg_value> so",
)  # fmt: skip
KINDS = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "is_on": {"type": "boolean"},
    "places": {"type": "array", "items": {"type": "string"}},
    "more": {"type": "object"},
    "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
}
TOOLS = [
    Tool(name, {"type": "object", "properties": KINDS})
    for name in ("get_weather", "search", "write-file", "a.b", "f")
]  # fmt: skip


def text_of(draw: random.Random, escapes: bool = True) -> str:
    words = _WORDS if escapes else [word for word in _WORDS if "'" not in word and "\\" not in word]
    return "".join(draw.choice(words) + draw.choice(("", " ")) for _ in range(draw.randrange(6)))


def arguments_of(draw: random.Random, kinds: tuple[str, ...], quotes_keys: bool = True, escapes: bool = True) -> dict:
    key = text_of if quotes_keys else lambda draw: draw.choice(("", "b", "naïve", "a-b c", "漢字"))
    values = {
        "text": lambda: text_of(draw, escapes),
        "count": lambda: draw.randrange(-99, 10**9),
        "share": lambda: draw.choice((0.5, -2.25, 1e-7, 3.0)),
        "is_on": lambda: draw.random() < 0.5,
        "places": lambda: [text_of(draw) for _ in range(draw.randrange(3))],
        "more": lambda: {"a": [{"b": text_of(draw)}, None, True], key(draw): {}} if draw.random() < 0.7 else {},
        "maybe": lambda: draw.choice((None, 7)),
    }
    names = draw.sample(kinds, min(len(kinds), draw.randrange(4)))
    return {name: values[name]() for name in sorted(names, key=kinds.index)}  # as grammars have them


def message_of(draw: random.Random, style: Style, kinds: tuple[str, ...] = tuple(KINDS)) -> dict:
    drawn = kinds, style.quotes_keys, style.escapes
    calls = [
        {
            "id": f"{draw.randrange(10**9):09}", "type": "function",
            "function": {"name": draw.choice(TOOLS).name, "arguments": arguments_of(draw, *drawn)},
        }
        for _ in range(draw.randrange(1, style.max_calls + 1))
    ]  # fmt: skip
    content = "Let me see: a < b." if style.has_content and draw.random() < 0.5 else ""
    return {"role": "assistant", "content": content, "tool_calls": calls}


class Writer:
    """Writes answers as a template does.

    Args:
        added: tags that are tokens of their own, wherever the tokenizer reads them.
    """

    def __init__(self, style: Style, added: Sequence[str] = ()) -> None:
        self.style, self.tokenizer, self.added = style, make_tokenizer("qwen"), added
        self.tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
        self.tokenizer.bos_token, self.tokenizer.eos_token = "<s>", "</s>"
        self.tokenizer.chat_template = style.text()
        self.form = AnswerFormat.of_tokenizer(self.tokenizer)

    def answer(self, message: dict) -> tuple[str, str]:
        """The prompt, and what the model writes behind it to say this message."""
        said, wanted = [{"role": "user", "content": "Q?"}], dict(tokenize=False, tools=None)
        wanted |= {"enable_thinking": True} if self.style.thinks else {}
        prompt = self.tokenizer.apply_chat_template(said, add_generation_prompt=True, **wanted)
        whole = self.tokenizer.apply_chat_template([*said, message], add_generation_prompt=False, **wanted)
        shared = next((at for at in range(len(prompt)) if prompt[at] != whole[at : at + 1]), len(prompt))
        text = whole[shared:]
        for end in self.style.ends:
            text = text.removesuffix(end)
        return prompt[:shared], text


def parsed(form: AnswerFormat, prompt: str, pieces: list[str], tools=TOOLS) -> Message:
    """The message that an answer in such pieces gives; ids are numbers."""
    parser, found = form.parser(prompt, tools, new_id=lambda: f"id{len(found.tool_calls)}"), Message()
    for piece in pieces:
        found.add(parser.push(piece))
    return found.add(parser.finish())
