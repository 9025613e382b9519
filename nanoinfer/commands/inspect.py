"""`nanoinfer inspect` on the command line: what a GGUF file holds."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from nanoinfer.common.terminal import without_orders
from nanoinfer.options.parser import Parser

_WIDTH = 14  # of the longest name, and of a space


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="FILE", help="a GGUF file, or what names one: a folder, org/name-GGUF:Q4_K_M")


def run(options: argparse.Namespace) -> int:
    """Print what the file says, and what it takes here; a ValueError says why it does not run."""
    from nanoinfer.gguf.shards import read_model  # with torch, as all below
    from nanoinfer.weights.find import find_model

    path = find_model(options.model, weights=False)
    if not path.is_file():
        raise ValueError(f"{path} is no GGUF file: nanoinfer plan says what a checkpoint takes")
    file = read_model(path)
    _print(_table(file))
    _print(_model(options.model))
    return 0


def _print(rows: Iterator[tuple[str, Any]]) -> None:
    for name, value in rows:
        print(without_orders(f"{name:{_WIDTH}} {value}").rstrip(), flush=True)


def _table(file: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the table of the file says, whether or not the model is supported."""
    from nanoinfer.common.units import counted, format_size

    paths = dict.fromkeys([file.path, *(tensor.path for tensor in file.tensors.values())])
    total = sum(tensor.num_bytes for tensor in file.tensors.values())
    yield "file", f"{file.path}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''}"
    yield "name", file.metadata.get("general.name", "none")
    yield "architecture", file.metadata.get("general.architecture", "none")
    yield "tensors", f"{counted(len(file.tensors), 'tensor')}, {format_size(total)}"
    counts, sizes = Counter(), Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += 1
        sizes[tensor.type.name] += tensor.num_bytes
    for kind, size in sizes.most_common():
        yield f"  {kind}", f"{counted(counts[kind], 'tensor')}, {format_size(size)}"
    texts = file.metadata.get("tokenizer.ggml.tokens")
    tokens = len(texts) if isinstance(texts, list) else 0
    kind = "/".join(str(file.metadata.get(f"tokenizer.ggml.{name}", "none")) for name in ("model", "pre"))
    yield "tokenizer", f"{kind}, {counted(tokens, 'token')}" if tokens else "none: give token ids, or --tokenizer"
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str):
        yield "template", "none: a chat needs --chat-template"
    else:
        yield "template", f"{len(template):,} characters"


def _model(model: str) -> Iterator[tuple[str, Any]]:
    """Yield what the engine makes of the file; ValueError if it is not supported."""

    import nanoinfer
    from nanoinfer.common.units import format_size
    from nanoinfer.devices.registry import accelerator
    from nanoinfer.weights.load import read_checkpoint, read_spec

    checkpoint = read_checkpoint(model)
    spec = read_spec(checkpoint, "auto")
    heads = " or ".join(
        f"{one.num_q_heads} heads of {one.head_dim} ({one.num_kv_heads} of keys and values)" for one in spec.attentions
    )
    sizes = f"{len(spec.layers)} layers of {spec.hidden_size}, {heads}"
    experts = "" if spec.sparse is None else f", {spec.sparse.num_chosen} of {spec.sparse.num_experts} experts"
    yield "model", f"{spec.architecture}: {sizes}{experts}"
    yield "context", f"{spec.max_position:,} tokens"
    held = f"{format_size(spec.weight_bytes - spec.table_bytes)} of weights, computed in {str(spec.dtype)[6:]}"
    if spec.table_bytes:
        held += f"; {format_size(spec.table_bytes)} of embeddings of each layer lie in host memory"
    yield "on the device", held
    if accelerator() is not None:
        yield "plan", ""
        yield from (("", line) for line in nanoinfer.plan(model).report().splitlines())
    else:
        yield "plan", 'there is no GPU here: nanoinfer plan FILE --gpu "RTX 4070" says what fits on a card'
