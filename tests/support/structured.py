"""A tiny model with a tokenizer of bytes and some words of JSON, random schemas, and what fulfils them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from engines import SMALL
from tiny_models import make_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB = 300  # of the model; the tokenizer has fewer
MERGES = ['{ "', '" :', '" ,', ", {", "t r", "tr u", "tru e", "f a", "fa l", "fal s", "fals e", "} ,", "1 2"]
END = "<end>"
PLAIN = "{% for message in messages %}{{ message.content }} {% endfor %}"
# As published templates have it: some begin what is thought in the prompt, others leave that to the model.
_OFF = "{{ 'A:' }}{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}"
_ON = {"begun": "{% else %}{{ '<think>\\n' }}", "not begun": ""}
THINKING = {begins: PLAIN + _OFF + on + "{% endif %}" for begins, on in _ON.items()}


def make_structured_tokenizer(template: str = PLAIN, added: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Every byte is a token, and so are some pairs, and what is added. The last but these ends a text."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [tuple(merge.split()) for merge in MERGES]
    tokens += ["".join(merge) for merge in merges]
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, additional_special_tokens=["<call>"])
    fast.add_tokens([AddedToken(text, normalized=False) for text in added])
    fast.chat_template = template
    return fast


def make_structured_checkpoint(directory: Path, template: str = PLAIN, added: Iterable[str] = (), **config) -> Path:
    tokenizer = make_structured_tokenizer(template, added)
    ends = dict(eos_token_id=tokenizer.eos_token_id, bos_token_id=None)
    path = make_checkpoint("qwen3", directory, **SMALL | dict(vocab_size=VOCAB) | ends | config)
    tokenizer.save_pretrained(path)
    return path


def random_schema(generator: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose texts are short, of keywords that `fulfils` knows."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "array", "anyOf", "tuple"] * 2 if depth else []
    match kind := generator.choice(kinds):
        case "string":
            return {"type": "string", "minLength": generator.randrange(2), "maxLength": generator.randint(1, 4)}
        case "integer":
            low = generator.randint(-20, 20)
            return {"type": "integer", "minimum": low, "maximum": low + generator.randrange(30)}
        case "number":
            return {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
        case "enum":
            return {"enum": generator.sample(["a", "é😀", 'q"', 1, -2.5, None, True, [1], {"k": "v"}], 3)}
        case "const":
            return {"const": generator.choice([0, "", "x\ny", False])}
        case "pattern":
            return {"type": "string", "pattern": generator.choice(["^[ab]{1,3}$", "^(x|yz)$", "^\\d{2}-\\d$"])}
        case "array":
            low = generator.randrange(2)
            bounds = {"minItems": low, "maxItems": low + generator.randrange(3)}
            return {"type": "array", "items": random_schema(generator, depth - 1)} | bounds
        case "tuple":
            items = [random_schema(generator, depth - 1) for _ in range(2)]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}
        case "object":
            names = generator.sample(["a", "b", "long name", "ü"], generator.randint(1, 3))
            properties = {name: random_schema(generator, depth - 1) for name in names}
            required = [name for name in names if generator.random() < 0.6]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "anyOf":
            return {"anyOf": [random_schema(generator, depth - 1) for _ in range(2)]}
        case _:
            return {"type": kind}


_TYPES = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int | float) and not isinstance(value, bool) and value == int(value),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def fulfils(value: Any, schema: Any) -> bool:
    """Whether a value fulfils a schema of `random_schema`, and of the keywords there only."""
    if isinstance(schema, bool):
        return schema
    checks = {
        "type": lambda kind: _TYPES[kind](value),
        "enum": lambda values: any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values),
        "const": lambda one: value == one and isinstance(value, bool) == isinstance(one, bool),
        "minLength": lambda low: len(value) >= low,
        "maxLength": lambda high: len(value) <= high,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "minimum": lambda low: value >= low,
        "maximum": lambda high: value <= high,
        "exclusiveMinimum": lambda low: value > low,
        "minItems": lambda low: len(value) >= low,
        "maxItems": lambda high: len(value) <= high,
        "prefixItems": lambda items: all(map(fulfils, value, items)),
        "items": lambda item: all(fulfils(one, item) for one in value[len(schema.get("prefixItems", ())) :]),
        "properties": lambda named: all(fulfils(value[name], one) for name, one in named.items() if name in value),
        "required": lambda names: value.keys() >= set(names),
        "additionalProperties": lambda allowed: allowed or value.keys() <= schema["properties"].keys(),
        "anyOf": lambda parts: any(fulfils(value, part) for part in parts),
    }
    return all(checks[name](wanted) for name, wanted in schema.items())


def is_answer(text: str, schema: Any) -> bool:
    return fulfils(json.loads(text), schema)
