#!/usr/bin/env python
"""Compares greedy answers to tiny random GGUF files with those of `llama-completion` of llama.cpp.

    python tools/gguf_completions.py --llama-completion build/bin/llama-completion
    python tools/gguf_completions.py --llama-completion build/bin/llama-completion --only gemma3 gpt-oss --seeds 8

needs the packages `gguf` and `transformers`. Each model is written in F32, with a tokenizer whose tokens are bytes, and
both programs answer the same texts on the CPU in float32. An answer that differs is a near tie where the two largest
logits of ours lie less than 1e-3 apart at the first token that differs; the smallest such distance of all tokens says
how clear the choices were. llama.cpp computes gelu in float16 on a CPU: an answer that is the same once ours does, too,
is counted by itself. The status is 1 if another answer differs.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests" / "support")]

from gguf_completions_cases import TAKEN, Case, cases_of  # noqa: E402
from gguf_models import ARCHITECTURES, FIELDS, write_gguf  # noqa: E402
from tiny_models import DELTA, VOCAB_SIZE, make_checkpoint  # noqa: E402

from nanoinfer import LLM, SamplingParams  # noqa: E402
from nanoinfer.kernels.activations import ACTIVATIONS  # noqa: E402

NEAR = 1e-3
CONTEXT = 256
ATTEMPTS = 20
ENDING = b"\n\n"
OF_GELU = ("gemma3", "gemma4", "gemma4_inputs", "gemma4_moe", "starcoder2")
PROMPT_LENGTHS = (1, 12, 50, 120)
# Tokens are single bytes, of those that GPT-2's letters leave as they are, so that bytes say tokens. A vocabulary must
# have a merge: the one here is of two bytes that no prompt has.
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


@dataclass(kw_only=True)
class Row:
    """What came of the models of a case. smallest: distance of the two largest logits at any token."""

    cases: int = 0
    identical: int = 0
    smallest: float = float("inf")
    rounded: list[str] = field(default_factory=list)
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
    fields = FIELDS.get(family, {}) | TAKEN.get(family, {}) | case.fields
    # So large that a model with another one answers otherwise.
    names = {"starcoder2": "norm_epsilon"} | dict.fromkeys(("nemotron", "lfm2", "lfm2_moe"), "norm_eps")
    # But for Gated DeltaNet, whose keys llama.cpp norms with it, and transformers with this one.
    fields[names.get(family, "rms_norm_eps")] = 1e-6 if family in DELTA else 0.02
    directory = make_checkpoint(family, folder / f"{seed}", seed=seed, **fields)
    without = dict.fromkeys(f"{ARCHITECTURES[family]}.{key}" for key in case.without)
    extra = TOKENIZER | case.extra | without
    return write_gguf(family, directory, folder / f"{seed}.gguf", change=case.change, merge=case.merge, **extra)


def prompts(seed: int) -> list[str]:
    """Texts that are a token for each character."""
    chosen = random.Random(seed)
    return ["".join(chosen.choices(_ASCII, k=length)) for length in PROMPT_LENGTHS]


def our_answers(path: Path, texts: list[str], num_tokens: int, overrides: dict[str, Any]) -> list[Answer]:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=3, logit_bias={END: -100.0})
    options = dict(device="cpu", dtype="float32", max_model_len=CONTEXT, progress_bar=False)
    with LLM(path, hf_overrides=overrides or None, **options) as llm:
        found = llm.generate(texts, params, use_tqdm=False)
    for text, one in zip(texts, found, strict=True):
        found_ids = [token for token in one.prompt_token_ids if token >= len(_SPECIAL)]
        assert found_ids == [TOKENS.index(letter) for letter in text]
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


@contextmanager
def rounded_gelu() -> Iterator[None]:
    """Ours computes gelu as llama.cpp does on a CPU: argument and value are float16 (GGML_GELU_FP16)."""
    name = "gelu_pytorch_tanh"
    exact = ACTIVATIONS[name]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.abs() < 10, F.gelu(x.half().float(), approximate="tanh").half().float(), x.relu())

    ACTIVATIONS[name] = rounded
    try:
        yield
    finally:
        ACTIVATIONS[name] = exact


def difference(ours: Answer, theirs: bytes) -> tuple[float, str]:
    """Return how far apart the two largest logits are where answers begin to differ, and the difference in words."""
    texts = texts_of(ours.token_ids)
    step = 0
    while step < len(texts) - 1 and theirs.startswith(b"".join(texts[: step + 1])):
        step += 1
    gap, rest = ours.gaps[step], theirs[len(b"".join(texts[:step])) :]
    return gap, f"token {step}, logits {gap:.1e} apart, ours {b''.join(texts[step : step + 8])!r}, theirs {rest[:8]!r}"


def is_same(ours: Answer, theirs: bytes) -> bool:
    return b"".join(texts_of(ours.token_ids)) == theirs


def compare(row: Row, program: str, family: str, case: Case, seed: int, path: Path, num_tokens: int) -> None:
    """Add the answers to a file to a row; RuntimeError if llama-completion fails."""
    texts = prompts(seed)
    theirs = [their_answer(program, path, text, num_tokens) for text in texts]
    ours = our_answers(path, texts, num_tokens, case.overrides)
    row.cases += len(texts)
    row.smallest = min(row.smallest, *(gap for answer in ours for gap in answer.gaps))
    differ = [at for at, (one, other) in enumerate(zip(ours, theirs, strict=True)) if not is_same(one, other)]
    row.identical += len(texts) - len(differ)
    again = ours
    if differ and family in OF_GELU:
        with rounded_gelu():
            again = our_answers(path, texts, num_tokens, case.overrides)
    for at in differ:
        gap, words = difference(ours[at], theirs[at])
        found = row.rounded if is_same(again[at], theirs[at]) else row.near if gap < NEAR else row.other
        found.append(f"seed {seed}, prompt of {len(texts[at])}: {words}")


def run_case(program: str, family: str, case: Case, seeds: int, num_tokens: int) -> Row:
    row = Row()
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            path = written(family, case, seed, Path(folder))
            try:
                compare(row, program, family, case, seed, path, num_tokens)
            except RuntimeError as error:
                row.refused = str(error)
                return row
    return row


def in_words(row: Row, case: Case) -> list[str]:
    found = [f"the same with gelu in float16, as llama.cpp has it: {one}" for one in row.rounded]
    found += [f"near tie: {one}" for one in row.near]
    found += [f"DIFFERS: {one}" for one in row.other]
    found += [f"llama-completion failed: {row.refused}"] if row.refused else []
    return found + ([f"compared as llama.cpp has it: it {case.theirs}"] if case.theirs else [])


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
    columns = ("architecture", "family", "model", "cases", "identical", "gelu", "near ties", "other", "smallest gap")
    print(*columns, sep=" | ", flush=True)
    print(*["---"] * len(columns), sep=" | ", flush=True)
    details, differ = [], False
    for family, architecture in ARCHITECTURES.items():
        if options.only and not {family, architecture} & set(options.only):
            continue
        for case in cases_of(family):
            row = run_case(options.llama_completion, family, case, options.seeds, options.tokens)
            counts = (row.cases, row.identical, len(row.rounded), len(row.near), len(row.other), f"{row.smallest:.1e}")
            print(architecture, family, case.name, *counts, sep=" | ", flush=True)
            details += [f"{family} ({case.name}): {one}" for one in in_words(row, case)]
            differ |= bool(row.other or row.refused)
    print("\n" + "\n".join(details or ["all answers are identical"]))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
