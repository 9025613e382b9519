"""A few batches again and again in eager offload mode, against resident mode: one of several that share a GPU.

    python tests/support/eager_batches.py DIR DEVICE SECONDS [RING_SLOT_BYTES]

It prints "ready" once the first batch was compared, waits for a line, and prints as JSON how many batches it has
compared and how the first one that has other bits differs (null: none does).
"""

from __future__ import annotations

import json
import random
import sys
import time

from gpu_models import COMMON

from nanoinfer import LLM, SamplingParams

# Some blocks become full, so that lists of splits change: at 1,024, 1,792 and 256 tokens.
LENGTHS, MAX_TOKENS = (1010, 300, 1780, 40, 250), 20
NUM_DRAWS = 4


def answers(llm: LLM, draw: int) -> list[tuple]:
    """Token ids and log-probabilities of each prompt of a batch."""
    generator = random.Random(draw)
    lengths = generator.sample(LENGTHS, len(LENGTHS))
    prompts = [{"prompt_token_ids": [generator.randrange(4000) for _ in range(length)]} for length in lengths]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=3)
        for i in range(len(prompts))
    ]
    found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(one.token_ids, one.logprobs) for one in found]


def difference(found: list[tuple], wanted: list[tuple]) -> str | None:
    """Return where the first prompt differs whose answer does."""
    for number, ((ids, logprobs), (wanted_ids, wanted_logprobs)) in enumerate(zip(found, wanted, strict=True)):
        for place, one in enumerate(zip(ids, logprobs, strict=True)):
            if one != (wanted_ids[place], wanted_logprobs[place]):
                return f"prompt {number}, token {place}: {one}, not {(wanted_ids[place], wanted_logprobs[place])}"
    return None if found == wanted else "the answers have other lengths"


def main(directory: str, device: str, seconds: float, ring_slot_bytes: int | None) -> None:
    arguments = COMMON | dict(block_size=256, max_num_batched_tokens=512, enable_prefix_caching=False)
    arguments |= dict(device=device, skip_tokenizer_init=True)
    with LLM(directory, **arguments | dict(resident_kv_limit=None)) as llm:
        wanted = [answers(llm, draw) for draw in range(NUM_DRAWS)]
    arguments |= dict(enable_cpu_offload=True, enforce_eager=True)
    if ring_slot_bytes is not None:
        arguments |= dict(num_ring_slots=2, ring_slot_bytes=ring_slot_bytes)
    with LLM(directory, **arguments) as llm:
        found, count = difference(answers(llm, 0), wanted[0]), 1
        assert llm.stats()["streamed_bytes"], "nothing has passed through the ring"
        print("ready", flush=True)
        sys.stdin.readline()
        end = time.monotonic() + seconds
        while found is None and time.monotonic() < end:
            draw = count % NUM_DRAWS
            found, count = difference(answers(llm, draw), wanted[draw]), count + 1
    print(json.dumps({"batches": count, "difference": found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4]) if sys.argv[4:] else None)
