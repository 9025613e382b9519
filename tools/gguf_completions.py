#!/usr/bin/env python
"""Compares greedy answers to tiny random GGUF files with those of `llama-completion` of llama.cpp.

    python tools/gguf_completions.py --llama-completion build/bin/llama-completion
    python tools/gguf_completions.py --llama-completion build/bin/llama-completion --only gemma3 gpt-oss --seeds 8

needs the packages `gguf` and `transformers`. Each model is written in F32, with a tokenizer whose tokens are bytes, and
both programs answer the same texts on the CPU in float32. An answer that differs is a near tie where the two largest
logits of ours lie less than 1e-3 apart at the first token that differs; the smallest such distance of all tokens says
how clear the choices were. The status is 1 if another answer differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from gguf_models import ARCHITECTURES, FIELDS, write_gguf  # noqa: E402
from tiny_models import VOCAB_SIZE, make_checkpoint  # noqa: E402

from nanoinfer import LLM, SamplingParams  # noqa: E402

NEAR = 1e-3
CONTEXT = 256
ATTEMPTS = 20
ENDING = b"\n\n"
PROMPT_LENGTHS = (1, 12, 50, 120)
# No word of a prompt, so that each is one text: tokens for single bytes that GPT-2's letters leave as they are.
_SPECIAL = ["<zero>", "<one>", "<two>"]
_ASCII = [chr(byte) for byte in range(0x21, 0x7F) if chr(byte) not in "<>"]
_MERGED = ["®¯"]
_OTHERS = [chr(byte) for byte in range(0xAE, 0x100)]
TOKENS = (_SPECIAL + _MERGED + _ASCII + _OTHERS)[:VOCAB_SIZE]
END = 2
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3] * len(_SPECIAL) + [1] * (VOCAB_SIZE - len(_SPECIAL)),
    "tokenizer.ggml.merges": ["® ¯"],
    "tokenizer.ggml.padding_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": END,
    "tokenizer.ggml.add_bos_token": False,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of a family.

    fields: of `tiny_config`. change: makes other weights, by their names in the file. extra: metadata, by whole keys.
    """

    name: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values
    extra: dict[str, Any] = field(default_factory=dict)


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4) | fields)


def _larger_experts(name: str, values: np.ndarray) -> np.ndarray:
    """So that what is clamped behind gate and up is beyond its limits at times."""
    return 4 * values if "ffn_gate_exps" in name or "ffn_up_exps" in name else values


def _larger_layers(name: str, values: np.ndarray) -> np.ndarray:
    """So that a tied head does not find the last token again."""
    return 6 * values if "post_" in name and "_norm" in name else values


_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_YARN = dict(factor=4.0, original_max_position_embeddings=64)
_LONG = dict(
    original_max_position_embeddings=64,
    short_factor=[1.0 + number / 7 for number in range(8)],
    long_factor=[1.0 + number / 3 for number in range(8)],
    attention_factor=1.190238,
)
_PART = _rope("default", partial_rotary_factor=0.25)
_BY_LAYER = dict(
    full_attention=dict(rope_type="linear", rope_theta=1e6, factor=8.0),
    sliding_attention=dict(rope_type="default", rope_theta=2e4),
)
# llama.cpp takes the hidden size to be that of all heads here, and no groups of heads of olmoe.
_TAKEN = {
    **dict.fromkeys(("qwen2", "exaone4", "nemotron", "olmo2", "olmo3", "starcoder2"), dict(hidden_size=64)),
    "olmoe": dict(num_kv_heads=4),
}
PLAIN = Case()
CASES: dict[str, list[Case]] = {
    "llama": [
        PLAIN,
        Case(name="tied", fields=dict(tied=True)),
        Case(name="biases", fields=dict(attention_bias=True)),
        Case(name="linear", fields=_rope("linear", factor=4.0)),
        Case(name="llama3", fields=_rope("llama3", **_LLAMA3) | dict(head_dim=64)),
    ],
    "qwen3": [PLAIN, Case(name="yarn", fields=_rope("yarn", **_YARN))],
    "gemma3": [
        PLAIN,
        Case(name="rotations", fields=dict(rope_parameters=_BY_LAYER)),
        Case(name="tied", fields=dict(tied=True), change=_larger_layers),
    ],
    "gpt_oss": [
        PLAIN,
        Case(name="unscaled", fields=_rope("default")),
        Case(name="yarn", fields=_rope("yarn", truncate=False, **_YARN)),
        Case(name="clamped", change=_larger_experts, fields=_rope("default")),
    ],
    "phi3": [
        PLAIN,
        Case(name="part of a head", fields=_PART),
        Case(name="longrope", fields=_rope("longrope", **_LONG) | dict(original_max_position_embeddings=64)),
    ],
    "smollm3": [Case(fields=dict(num_layers=5))],
    "glm4": [PLAIN, Case(name="part of a head", fields=_PART)],
    "nemotron": [PLAIN, Case(name="part of a head", fields=_PART)],
    "exaone4": [Case(fields=dict(sliding_window=0)), Case(name="64 layers, window", fields=dict(num_layers=64))],
    "ministral3": [
        PLAIN,
        Case(name="scaled", fields=_rope("yarn", llama_4_scaling_beta=0.5, mscale_all_dim=1.0, mscale=1.0, **_YARN)),
    ],
}
"""By family; another one has the plain case alone."""


@dataclass(kw_only=True)
class Row:
    """What came of the models of a case."""

    cases: int = 0
    identical: int = 0
    smallest: float = float("inf")
    near: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """gaps: between the two largest logits at each token."""

    token_ids: list[int]
    gaps: list[float]


def written(family: str, case: Case, seed: int, folder: Path) -> Path:
    """Write a model and return the path of its file."""
    fields = FIELDS.get(family, {}) | _TAKEN.get(family, {}) | case.fields
    # So large that a model with another one answers otherwise.
    fields[{"nemotron": "norm_eps", "starcoder2": "norm_epsilon"}.get(family, "rms_norm_eps")] = 0.02
    directory = make_checkpoint(family, folder / f"{seed}", seed=seed, **fields)
    extra = TOKENIZER | case.extra
    return write_gguf(family, directory, folder / f"{seed}.gguf", change=case.change, **extra)


def prompts(seed: int) -> list[str]:
    """Texts that are a token for each character."""
    chosen = random.Random(seed)
    return ["".join(chosen.choices(_ASCII, k=length)) for length in PROMPT_LENGTHS]


def our_answers(path: Path, texts: list[str], num_tokens: int) -> list[Answer]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=3, logit_bias={END: -100.0})
    options = dict(device="cpu", dtype="float32", max_model_len=CONTEXT, progress_bar=False)
    with LLM(path, **options) as llm:
        found = llm.generate(texts, params, use_tqdm=False)
    for text, one in zip(texts, found, strict=True):
        assert one.prompt_token_ids == [TOKENS.index(letter) for letter in text]
    return [Answer(token_ids=one.outputs[0].token_ids, gaps=list(_gaps(one.outputs[0]))) for one in found]


def _gaps(output: Any) -> Iterator[float]:
    for at in output.logprobs:
        first, second, *_ = sorted((one.logprob for token, one in at.items() if token != END), reverse=True)
        yield first - second


def their_answer(program: str, path: Path, text: str, num_tokens: int) -> bytes:
    """Return the bytes that llama-completion writes; RuntimeError with its last words if it fails."""
    prompt = path.with_suffix(".txt")
    prompt.write_text(text)
    command = [program, "-m", path, "-f", prompt, "-n", num_tokens, "-c", CONTEXT, "-t", 1, "-ngl", 0]
    command += ["--temp", 0, "-no-cnv", "-ctk", "f32", "-ctv", "f32", "-fa", "off", "--ignore-eos", "--special"]
    command += ["--no-display-prompt", "--no-escape", "--no-warmup", "--simple-io"]
    for _ in range(ATTEMPTS):
        done = subprocess.run(list(map(str, command)), capture_output=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            break
        # It writes in a thread, and ends at times before that has written all.
        if done.stdout.endswith(ENDING):
            return done.stdout.removesuffix(ENDING)
    lines = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    raise RuntimeError(f"status {done.returncode}: " + " / ".join(lines[-4:]))


def texts_of(token_ids: list[int]) -> list[bytes]:
    """The bytes of each token."""
    return [TOKENS[token].encode("latin-1") for token in token_ids]


def compare(row: Row, name: str, ours: Answer, theirs: bytes) -> None:
    """Add one answer to a row."""
    row.cases += 1
    row.smallest = min(row.smallest, *ours.gaps)
    written = texts_of(ours.token_ids)
    if b"".join(written) == theirs:
        row.identical += 1
        return
    step = 0
    while step < len(written) and theirs.startswith(b"".join(written[: step + 1])):
        step += 1
    gap = ours.gaps[min(step, len(written) - 1)]
    rest = theirs[len(b"".join(written[:step])) :]
    found = f"{name}: token {step}, logits {gap:.1e} apart, ours {written[step : step + 4]}, theirs {rest[:8]!r}"
    (row.near if gap < NEAR else row.other).append(found)


def run_case(program: str, family: str, case: Case, seeds: int, num_tokens: int) -> Row:
    row = Row()
    for seed in range(seeds):
        texts = prompts(seed)
        with tempfile.TemporaryDirectory() as folder:
            path = written(family, case, seed, Path(folder))
            ours = our_answers(path, texts, num_tokens)
            for text, answer in zip(texts, ours, strict=True):
                try:
                    theirs = their_answer(program, path, text, num_tokens)
                except RuntimeError as error:
                    row.refused = str(error)
                    return row
                compare(row, f"seed {seed}, prompt of {len(text)}", answer, theirs)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-completion", required=True, help="path of the program")
    parser.add_argument("--only", nargs="+", default=[], help="architectures or families (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="models of each case")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    options = parser.parse_args()
    known = {*ARCHITECTURES, *ARCHITECTURES.values()}
    if unknown := [name for name in options.only if name not in known]:
        parser.error(f"no architecture {', '.join(unknown)}: there are {', '.join(sorted(known))}")
    print("| architecture | family | model | cases | identical | near ties | other | smallest gap |", flush=True)
    print("|---|---|---|---|---|---|---|---|", flush=True)
    details, differ = [], False
    for family, architecture in ARCHITECTURES.items():
        if options.only and not {family, architecture} & set(options.only):
            continue
        for case in CASES.get(family, [PLAIN]):
            row = run_case(options.llama_completion, family, case, options.seeds, options.tokens)
            counts = f"{row.cases} | {row.identical} | {len(row.near)} | {len(row.other)} | {row.smallest:.1e}"
            print(f"| {architecture} | {family} | {case.name or 'plain'} | {counts} |", flush=True)
            found = [f"near tie: {one}" for one in row.near] + [f"DIFFERS: {one}" for one in row.other]
            found += [f"llama-completion failed: {row.refused}"] if row.refused else []
            details += [f"{family} ({case.name or 'plain'}): {one}" for one in found]
            differ |= bool(row.other or row.refused)
    print("\n" + "\n".join(details or ["all answers are identical"]))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
