#!/usr/bin/env python
"""What masks of structured outputs cost a decode step, and how long the device waits for the host that makes them.

python tools/gpu_structured.py [SHAPE]          (default: qwen3-4b; needs llguidance)

Prints for 1 and 64 rows a step with and without masks, measured in turn, and the pauses between logits and sampling.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(ROOT / "tests" / "gpu"), str(ROOT / "tools")]

import torch  # noqa: E402
from gpu_kernels import profile_steps  # noqa: E402
from pauses import pauses  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from nanoinfer import EngineConfig, LLMEngine, SamplingParams  # noqa: E402
from nanoinfer.models.shapes import SHAPES, write_shape  # noqa: E402

BATCHES, CONTEXT, WARM_UP, NUM_STEPS, ROUNDS = (1, 64), 512, 8, 100, 5
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["one", "two", "three"]},
        "size": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "kind", "size", "tags"],
    "additionalProperties": False,
}
# None of them ends while it is measured.
FORMS = {
    "none": None,
    "texts in JSON": dict(json={"type": "array", "items": {"type": "string"}, "minItems": 3_000}),
    "records": dict(json={"type": "array", "items": RECORD, "minItems": 3_000}, disable_any_whitespace=True),
}


def make_tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """A tokenizer of as many tokens as a real one has: bytes, and words of letters, digits and signs of JSON."""
    generator, alphabet = random.Random(0), sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(alphabet)
    signs = ['"', '":', '","', '",', "},{", '{"', "[", "]", "0.", "12"]
    while len(tokens) < num_tokens - 1:
        word = "".join(generator.choices("etaoinshrdlucmfwypvbgkjqxz", k=generator.randint(1, 8)))
        kind = generator.random()
        word = word.capitalize() if kind < 0.2 else word
        tokens["Ġ" * (kind < 0.5) + word + generator.choice(signs) * (kind > 0.95)] = None
    made = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def make_engine(directory: str, batch: int) -> LLMEngine:
    memory = dict(gpu_memory_limit="24GiB") if torch.cuda.is_available() else {}
    return LLMEngine(
        EngineConfig(
            model=directory, load_format="dummy", generation_config="vllm", max_num_seqs=batch, progress_bar=False,
            max_model_len=CONTEXT + 1024, enable_prefix_caching=False, **memory,
        )
    )  # fmt: skip


def begin(engine: LLMEngine, batch: int, form: dict | None, seed: int, vocab_size: int) -> None:
    """Queue the requests, and step until all of them decode."""
    generator = random.Random(seed)
    for number in range(batch):
        prompt = [generator.randrange(vocab_size) for _ in range(CONTEXT)]
        params = SamplingParams(
            temperature=1, seed=number, max_tokens=1000, ignore_eos=True, detokenize=False, structured_outputs=form
        )
        engine.add_request(f"{seed}-{number}", prompt, params)
    while not all(sequence.num_generated > WARM_UP for sequence in engine.work.sequences):
        engine.step()


def end(engine: LLMEngine, batch: int) -> None:
    failed = [request.error for request in engine.work.requests.values() if request.error]
    assert len(engine.work.requests) == batch and not failed, f"a request has ended: {failed}"
    for name in list(engine.work.requests):
        engine.abort(name)
    while engine.has_work:
        engine.step()


def seconds_per_step(engine: LLMEngine, batch: int, form: dict | None, seed: int, num_steps: int) -> float:
    begin(engine, batch, form, seed, engine.vocab_size)
    start = time.perf_counter()
    for _ in range(num_steps):  # each reads the step before: as long as the device takes, or the host
        engine.step()
    seconds = (time.perf_counter() - start) / num_steps
    end(engine, batch)
    return seconds


def main(shape: str = "qwen3-4b", num_steps: int = NUM_STEPS, num_rounds: int = ROUNDS) -> None:
    vocab_size = SHAPES[shape]["vocab_size"]
    tokenizer = make_tokenizer(vocab_size - vocab_size // 500)
    with tempfile.TemporaryDirectory() as directory:
        write_shape(shape, Path(directory))
        tokenizer.save_pretrained(directory)
        Path(directory, "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(f"{shape}, {vocab_size} tokens, {where}: a decode step, milliseconds, the median of {num_rounds} rounds")
        for batch in BATCHES:
            engine = make_engine(directory, batch)
            found = {name: [] for name in FORMS}
            for number in range(num_rounds + 1):
                for name, form in FORMS.items():
                    seconds = seconds_per_step(engine, batch, form, number, num_steps)
                    if number:  # the first round compiles kernels and grammars
                        found[name].append(seconds)
            for name, rounds in found.items():
                ratio = statistics.median(one / none for one, none in zip(rounds, found["none"], strict=True))
                line = f"{batch:4} rows, {name:14} {1000 * statistics.median(rounds):8.3f}  x {ratio:.4f}"
                if torch.cuda.is_available():
                    begin(engine, batch, FORMS[name], num_rounds + 1, vocab_size)
                    waits = sorted(pauses(profile_steps(engine.step, num_steps)))
                    end(engine, batch)
                    figures = statistics.median(waits), waits[len(waits) * 95 // 100], waits[-1]
                    line += "  pauses, us: median {:.1f}, 95 % {:.1f}, longest {:.1f}".format(*figures)
                print(line, flush=True)
            engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
