#!/usr/bin/env python
"""Perplexity of a text in each format of weights and of the KV cache, and the error that a format makes of the weights.

python tools/perplexity.py CHECKPOINT TEXT [--tokens 1500] [--formats none int8 fp8 int4] [--kv auto int8 k8v4 int4]
Formats of weights are those of a checkpoint in 16 bits. All is computed in float32 on the CPU, as one prefill.
"""

from __future__ import annotations

import argparse
import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch
from torch import Tensor
from transformers import AutoTokenizer

from nanoinfer.common.kv_formats import KV_FORMATS
from nanoinfer.config import QUANTISED
from nanoinfer.kernels.kv.registry import make_format
from nanoinfer.layers.linear import Linear
from nanoinfer.models.decoder import Decoder
from nanoinfer.recall.formats import prompt_logits
from nanoinfer.weights.load import load_model, read_checkpoint, read_spec
from nanoinfer.weights.quantize import quantised_while_read


def model_of(checkpoint: Path, quantization: str | None, num_tokens: int, kv_cache_dtype: str = "auto") -> Decoder:
    info = quantised_while_read(read_checkpoint(checkpoint), quantization, None)
    spec = read_spec(info, torch.float32).with_kv(None, make_format(kv_cache_dtype))
    return load_model(info, spec, "cpu", max_position=num_tokens, progress=False)


def perplexity(model: Decoder, token_ids: list[int]) -> float:
    """Of all tokens but the first, each after all before it."""
    logits, wanted = prompt_logits(model, token_ids)[:-1], torch.tensor(token_ids[1:])
    return torch.nn.functional.cross_entropy(logits.double(), wanted).exp().item()


def projections(model: Decoder) -> dict[str, Linear]:
    """All but head and embeddings."""
    return {name: one for name, one in model.named_modules() if isinstance(one, Linear) and "layers." in name}


def relative_error(model: Decoder, wide: dict[str, Tensor]) -> float:
    """The root of the squared differences over that of the squares, of all weights together."""
    found = projections(model)
    lost = sum((one.weights.matrix(one) - wide[name]).double().square().sum() for name, one in found.items())
    return (lost / sum(matrix.double().square().sum() for matrix in wide.values())).sqrt().item()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("text", type=Path, help="a file; its first 12,000 characters are read")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--formats", nargs="+", choices=("none", *QUANTISED), default=("none", *QUANTISED))
    parser.add_argument("--kv", nargs="+", choices=KV_FORMATS, default=["auto"], help="each with each of the weights'")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")[:12_000]
    token_ids = AutoTokenizer.from_pretrained(options.checkpoint)(text).input_ids[: options.tokens]
    print(
        f"| weights | KV | error of a weight | perplexity of {len(token_ids):,} tokens |\n|{' --- |' * 4}", flush=True
    )
    model = model_of(options.checkpoint, None, len(token_ids))
    wide = {name: one.weights.matrix(one).clone() for name, one in projections(model).items()}
    for name, kv in product(options.formats, options.kv):
        del model
        model = model_of(options.checkpoint, None if name == "none" else name, len(token_ids), kv)
        error, found = relative_error(model, wide), perplexity(model, token_ids)
        print(f"| {'16 bits' if name == 'none' else name} | {kv} | {error:.4f} | {found:.3f} |", flush=True)


if __name__ == "__main__":
    main()
