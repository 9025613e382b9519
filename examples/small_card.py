"""Look what fits on a card of 8 GB, and run it within the same limits.

    python examples/small_card.py Qwen/Qwen3-4B "Write a limerick about memory."

Such a card has some 7.6 GiB, of which a desktop takes a part: give a lower --gpu-memory-limit there.
"""

import argparse
import sys

import nanoinfer


def main() -> None:
    parser = argparse.ArgumentParser(description="Plan for a small card, then run within the plan.")
    parser.add_argument("model", help="checkpoint directory or hub id, in 16 bits")
    parser.add_argument("prompt")
    parser.add_argument("--gpu-memory-limit", default="7GiB")
    parser.add_argument("--host-memory-limit", default="16GiB", help="for KV blocks that the GPU does not hold")
    parser.add_argument("--max-model-len", type=int, default=24_576, help="tokens of prompt and answer")
    options = parser.parse_args()

    settings = dict(
        gpu_memory_limit=options.gpu_memory_limit,
        host_memory_limit=options.host_memory_limit,
        max_model_len=options.max_model_len,
        max_num_seqs=1,
        quantization="int4",
        enable_cpu_offload="auto",
    )
    forecast = nanoinfer.plan(options.model, **settings)
    print(forecast.report(), file=sys.stderr)
    if not forecast.fits:
        sys.exit(1)  # the report says what would fit

    with nanoinfer.LLM(options.model, **settings) as llm:
        params = nanoinfer.SamplingParams(temperature=0, max_tokens=256)
        [output] = llm.chat([{"role": "user", "content": options.prompt}], params)
        print(output.outputs[0].text)


if __name__ == "__main__":
    main()
