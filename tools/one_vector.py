#!/usr/bin/env python
"""What one vector for key and value changes of a model, beside what 16 bits change of float32 (docs/exactness.md).

python tools/one_vector.py MODEL [--tokens 1024 8192] [--text FILE] [--device cuda]
MODEL is a checkpoint in 16 bits, or a shape such as gemma-4-12b, whose weights are random. A prompt is one prefill: the
log-probabilities of its tokens and the likeliest token behind each, with one vector and in float32, beside two vectors.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from transformers import AutoTokenizer

from nanoinfer.kernels.kv.registry import make_format
from nanoinfer.measure.run import free_memory
from nanoinfer.models.base import ModelSpec
from nanoinfer.models.checkpoint_info import CheckpointInfo
from nanoinfer.models.decoder import Decoder
from nanoinfer.models.shapes import SHAPES, write_shape
from nanoinfer.recall.formats import ROWS_AT_ONCE, prompt_logits_in_turn
from nanoinfer.weights.load import load_model, read_checkpoint, read_spec


class Said(NamedTuple):
    """Of a prompt: the log-probability of each token but the first, and which token was likeliest there."""

    logprobs: Tensor
    likeliest: Tensor


class Beside(NamedTuple):
    """How far one is from another: differences of log-probabilities, and the share of equal likeliest tokens."""

    largest: float
    mean: float
    equal: float


def said(model: Decoder, token_ids: list[int]) -> Said:
    wanted = torch.tensor(token_ids[1:], device=model.norm.weight.device)
    logprobs, likeliest = [], []
    for rows, tokens in zip(prompt_logits_in_turn(model, token_ids), wanted.split(ROWS_AT_ONCE), strict=False):
        rows = rows[: len(tokens)]  # nothing follows the last token
        logprobs.append(rows.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu())
        likeliest.append(rows.argmax(-1).cpu())
    return Said(torch.cat(logprobs), torch.cat(likeliest))


def beside(one: Said, other: Said) -> Beside:
    apart = (one.logprobs - other.logprobs).abs()
    equal = (one.likeliest == other.likeliest).double().mean().item()
    return Beside(apart.max().item(), apart.mean().item(), equal)


def keys_that_differ(model: Decoder, seed: int = 0) -> float:
    """The share of numbers of keys, before they are turned, that come out otherwise of a rounded value: of values as
    random as those of a norm are."""
    generator, found, spec = torch.Generator().manual_seed(seed), [], model.spec
    for layer, attention in zip(spec.attention_layers, spec.attention_of, strict=True):
        if attention.keeps_one_vector and layer in spec.kv_layers:
            weight = model.layers[layer].self_attn.k_norm.weight.float().cpu()
            value = torch.randn(1024, len(weight), generator=generator)
            made = (value.to(spec.dtype).float() * weight).to(spec.dtype)
            found.append((made != (value * weight).to(spec.dtype)).double().mean())
    return torch.stack(found).mean().item()


def models_of(
    info: CheckpointInfo, dtype: torch.dtype, device: str, most: int, seed: int | None
) -> Iterator[tuple[str, Decoder]]:
    """Yield models of the same weights: with two vectors, with one, and in float32. Whoever lets go of each before the
    next has the memory of one."""
    two, drawn = str(dtype).removeprefix("torch."), {}
    for name, wide, kv in (("two", dtype, two), ("one", dtype, "auto"), ("float32", torch.float32, "auto")):
        free_memory()
        spec: ModelSpec = read_spec(info, wide).with_kv(None, make_format(kv))
        model = load_model(info, spec, device, max_position=most, progress=False, seed=seed)
        if seed is not None:  # noise is drawn in the type of the weights
            drawn = drawn or {at: weight.cpu() for at, weight in model.named_parameters()}
            for at, weight in model.named_parameters():
                weight.data.copy_(drawn[at])
        yield name, model
        del model


NAMES = {"one": "one vector", "float32": "float32, one vector"}
HEAD = ["| tokens | beside two vectors | largest | mean | equal likeliest tokens, % |", "| --- " * 5 + "|"]


def report(name: str, found: list[Said], wanted: list[Said]) -> Iterator[str]:
    for one, two in zip(found, wanted, strict=True):
        largest, mean, equal = beside(one, two)
        yield f"| {len(one.logprobs) + 1:,} | {name} | {largest:.3g} | {mean:.3g} | {100 * equal:.2f} |"


def prompts_of(directory: Path, info: CheckpointInfo, counts: list[int], text: Path | None) -> list[list[int]]:
    if text is None:
        drawn = random.Random(0)
        return [[drawn.randrange(3, info.hf_config.vocab_size) for _ in range(count)] for count in counts]
    found = AutoTokenizer.from_pretrained(directory)(text.read_text(encoding="utf-8")).input_ids
    if len(found) < max(counts):
        raise ValueError(f"{text} has {len(found):,} tokens: give a longer text, or --tokens of at most that")
    return [found[:count] for count in counts]


@torch.inference_mode()
def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help=f"a checkpoint's directory, or a shape: {', '.join(SHAPES)}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192], help="of each prompt")
    parser.add_argument("--text", type=Path, help="of which prompts are the beginning; default: random tokens")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="beside float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(words)
    with ExitStack() as stack:
        directory, seed = Path(options.model), None
        if options.model in SHAPES:
            directory, seed = Path(write_shape(options.model, stack.enter_context(tempfile.TemporaryDirectory()))), 0
        info = read_checkpoint(directory)
        prompts = prompts_of(directory, info, options.tokens, options.text)
        spec = read_spec(info, options.dtype)
        if not any(attention.keeps_one_vector for attention in spec.attentions):
            parser.error(f"{options.model} has no layer that makes keys and values of one projection")
        print("\n".join(HEAD), flush=True)
        wanted, differing = [], 0.0
        for name, model in models_of(info, spec.dtype, options.device, max(options.tokens), seed):
            found = [said(model, token_ids) for token_ids in prompts]
            if name == "two":
                wanted = found
            else:
                print("\n".join(report(NAMES[name], found, wanted)), flush=True)
            differing = keys_that_differ(model) if name == "one" else differing
            del model
    print(f"numbers of keys that differ in the last place: {100 * differing:.1f}%")


if __name__ == "__main__":
    main()
