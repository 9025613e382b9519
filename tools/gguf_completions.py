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
from dataclasses import dataclass, field, replace
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
    without: metadata that is left out, by keys behind the architecture's name. merge: q, k and v are one tensor.
    theirs: what llama.cpp does other than transformers, and so than we do. overrides: `hf_overrides` that make ours do
    it too: the answers are identical then, or there is another reason.
    """

    name: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    change: Callable[[str, np.ndarray], np.ndarray] = lambda name, values: values
    extra: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    merge: bool = False
    theirs: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=1e4) | fields)


def _longrope(length: int, num_factors: int = 8) -> dict[str, Any]:
    """A context above the length takes the long factors."""
    factors = dict(
        short_factor=[1.0 + number / 7 for number in range(num_factors)],
        long_factor=[1.0 + number / 3 for number in range(num_factors)],
    )
    length = dict(original_max_position_embeddings=length)
    share = dict(partial_rotary_factor=num_factors / 8)
    return _rope("longrope", attention_factor=1.190238, **factors, **length, **share) | length


def _larger_experts(name: str, values: np.ndarray) -> np.ndarray:
    """So that what is clamped behind gate and up is beyond its limits at times."""
    return 4 * values if "ffn_gate_exps" in name or "ffn_up_exps" in name else values


def _larger_layers(name: str, values: np.ndarray) -> np.ndarray:
    """So that a tied head does not find the last token again."""
    return 6 * values if "post_" in name and "_norm" in name else values


_LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
_YARN = dict(factor=4.0, original_max_position_embeddings=64)
_PLAIN_BY_LAYER = dict.fromkeys(("full_attention", "sliding_attention"), dict(rope_type="default", rope_theta=1e4))
_YARN_BY_LAYER = _PLAIN_BY_LAYER | dict(full_attention=dict(rope_type="yarn", rope_theta=1e4, **_YARN))
_LENGTH = dict(original_max_position_embeddings=64)
_LENGTH_KEY = "rope.scaling.original_context_length"
_MINISTRAL = dict(llama_4_scaling_beta=0.5, mscale_all_dim=0.5, mscale=1.0)
_YARN_KEYS = ("rope.scaling.yarn_log_multiplier", "attention.temperature_scale")
_HEAD_KEYS = ("attention.key_length", "attention.value_length", "attention.head_count_kv")
_ROUTING_KEYS = (
    *("expert_weights_scale", "expert_weights_norm", "expert_gating_func", "expert_group_count"),
    *("expert_group_used_count", "leading_dense_block_count"),
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
_BEGIN_KEY = "tokenizer.ggml.add_bos_token"
# What files may leave out, for what llama.cpp takes then.
_ROPE_KEYS = ("rope.freq_base", "rope.dimension_count", "rope.freq_base_swa")
CASES: dict[str, list[Case]] = {
    "llama": [
        PLAIN,
        Case(name="tied", fields=dict(tied=True)),
        Case(name="biases", fields=dict(attention_bias=True, mlp_bias=True)),
        Case(name="linear", fields=_rope("linear", factor=4.0)),
        Case(name="linear, old key", extra={"llama.rope.scale_linear": 4.0}),
        Case(name="unscaled", extra={"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}),
        Case(name="llama3", fields=_rope("llama3", **_LLAMA3) | dict(head_dim=64)),
        Case(name="factors", fields=_rope("llama3", **_LLAMA3 | _LENGTH) | dict(head_dim=64)),
        Case(name="yarn", fields=_rope("yarn", **_YARN)),
        Case(name="keys left out", fields=dict(hidden_size=64, num_kv_heads=4), without=(*_ROPE_KEYS, *_HEAD_KEYS)),
        Case(name="begin token", extra={_BEGIN_KEY: True}),
        Case(name="begin token by rule", extra={_BEGIN_KEY: None, "tokenizer.ggml.pre": "llama-bpe"}),
    ],
    "qwen3": [
        PLAIN,
        Case(name="tied", fields=dict(tied=True)),
        Case(name="yarn", fields=_rope("yarn", **_YARN)),
        Case(
            name="yarn, other betas",
            fields=_rope("yarn", beta_fast=4.0, beta_slow=0.5, **_YARN),
            overrides=_rope("yarn", **_YARN),
            theirs="reads yarn_beta_fast and yarn_beta_slow of mistral3 alone",
        ),
        Case(name="yarn without length", fields=_rope("yarn", **_YARN), without=(_LENGTH_KEY,)),
    ],
    "qwen3_moe": [
        PLAIN,
        Case(name="size of all experts", fields=dict(intermediate_size=72), without=("expert_feed_forward_length",)),
        Case(name="size of an expert", without=("feed_forward_length",)),
    ],
    "gemma3": [
        PLAIN,
        Case(name="rotations", fields=dict(rope_parameters=_BY_LAYER)),
        Case(name="tied", fields=dict(tied=True), change=_larger_layers),
        Case(name="softcap", fields=dict(final_logit_softcapping=3.0)),
        Case(name="62 layers", fields=dict(num_layers=62, query_pre_attn_scalar=12)),
        Case(name="no window", without=("attention.sliding_window", "rope.freq_base_swa")),
        Case(name="every third", extra={"gemma3.attention.sliding_window_pattern": 3}),
        Case(name="keys left out", without=_ROPE_KEYS),
    ],
    "gpt_oss": [
        Case(fields=_rope("default")),
        Case(name="clamped", change=_larger_experts, fields=_rope("default")),
        Case(name="linear", fields=_rope("linear", factor=4.0)),
        Case(
            name="yarn",
            fields=_rope("yarn", truncate=False, **_YARN),
            overrides=_rope("yarn", truncate=True, **_YARN),
            theirs="rounds the two ends of yarn's ramp, which gpt-oss was trained without (truncate: false)",
        ),
    ],
    "phi3": [
        PLAIN,
        Case(name="part of a head", fields=_PART),
        Case(
            name="window",
            fields=dict(sliding_window=8),
            overrides=dict(sliding_window=None),
            theirs="leaves out the window of phi3, and says so",
        ),
        Case(name="longrope", fields=_longrope(64)),
        Case(name="longrope, short", fields=_longrope(1024)),
        Case(name="longrope of a part", fields=_longrope(64, 4)),
    ],
    "granite": [
        PLAIN,
        Case(name="tied", fields=dict(tied=True, embedding_multiplier=0.5, residual_multiplier=1.5)),
        Case(name="biases", fields=dict(attention_bias=True, mlp_bias=True)),
        Case(name="keys left out", without=("residual_scale", "embedding_scale", "attention.scale")),
    ],
    "smollm3": [Case(fields=dict(num_layers=5))],
    "glm4": [PLAIN, Case(name="biases, part of a head", fields=_PART | dict(attention_bias=True))],
    "glm4_moe": [
        PLAIN,
        Case(name="norms of heads", fields=dict(use_qk_norm=True, attention_bias=True)),
        Case(name="no groups", fields=dict(n_group=1, norm_topk_prob=False, routed_scaling_factor=2.5)),
        Case(name="dense first", fields=dict(first_k_dense_replace=2, n_shared_experts=2)),
        Case(name="keys left out", fields=dict(first_k_dense_replace=0), without=_ROUTING_KEYS),
    ],
    "nemotron": [PLAIN, Case(name="part of a head", fields=_PART), Case(name="biases", fields=dict(mlp_bias=True))],
    "exaone4": [
        Case(fields=dict(sliding_window=0)),
        Case(name="factors", fields=_rope("llama3", **_LLAMA3 | _LENGTH) | dict(sliding_window=0)),
        Case(name="64 layers, window", fields=dict(num_layers=64)),
        Case(name="64 layers, linear", fields=_rope("linear", factor=4.0) | dict(num_layers=64)),
        Case(
            name="64 layers, keys left out", fields=dict(num_layers=64), without=("attention.sliding_window_pattern",)
        ),
    ],
    "olmo3": [
        PLAIN,
        Case(name="yarn", fields=dict(rope_parameters=_YARN_BY_LAYER)),
        Case(
            name="theta of windows",
            fields=dict(rope_parameters=_PLAIN_BY_LAYER),
            extra={"olmo2.rope.freq_base_swa": 500.0},
            overrides=dict(rope_parameters=_PLAIN_BY_LAYER),
            theirs="reads rope.freq_base_swa of olmo2, but turns all layers by rope.freq_base",
        ),
        Case(
            name="keys left out", fields=dict(num_layers=5), without=("attention.sliding_window_pattern", *_ROPE_KEYS)
        ),
    ],
    "ministral3": [
        PLAIN,
        Case(name="scaled", fields=_rope("yarn", llama_4_scaling_beta=0.5, mscale_all_dim=1.0, mscale=1.0, **_YARN)),
        Case(name="betas", fields=_rope("yarn", beta_fast=8.0, beta_slow=2.0, **_MINISTRAL, **_YARN)),
        Case(name="keys left out", fields=_rope("yarn", **_MINISTRAL, **_YARN), without=_YARN_KEYS),
    ],
}
"""By family; another one has the plain case alone. All but phi3, where it is always so, also have q, k and v merged."""


def cases_of(family: str) -> list[Case]:
    found = CASES.get(family, [PLAIN])
    return found if family == "phi3" else [*found, replace(found[0], name="q, k and v merged", merge=True)]


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
            ours = our_answers(path, texts, num_tokens, case.overrides)
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
        for case in cases_of(family):
            row = run_case(options.llama_completion, family, case, options.seeds, options.tokens)
            counts = f"{row.cases} | {row.identical} | {len(row.near)} | {len(row.other)} | {row.smallest:.1e}"
            print(f"| {architecture} | {family} | {case.name or 'plain'} | {counts} |", flush=True)
            found = [f"near tie: {one}" for one in row.near] + [f"DIFFERS: {one}" for one in row.other]
            found += [f"llama-completion failed: {row.refused}"] if row.refused else []
            found += [f"compared as llama.cpp has it, which {case.theirs}"] if case.theirs else []
            details += [f"{family} ({case.name or 'plain'}): {one}" for one in found]
            differ |= bool(row.other or row.refused)
    print("\n" + "\n".join(details or ["all answers are identical"]))
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
