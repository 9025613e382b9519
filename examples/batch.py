"""Complete many prompts at once and write the answers as JSON lines.

    python examples/batch.py MODEL prompts.txt > answers.jsonl

The file has one prompt a line. All of them run together, as many at once as the memory holds.
"""

import argparse
import json

from nanoinfer import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Complete the prompts of a file, one a line.")
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("prompts", help="text file with one prompt a line")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()

    with open(options.prompts, encoding="utf-8") as file:
        prompts = [line.strip() for line in file if line.strip()]
    # One conversation for each prompt. For a model without a chat template: llm.generate(prompts, params).
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)

    with LLM(options.model, enable_cpu_offload="auto") as llm:
        for prompt, output in zip(prompts, llm.chat(conversations, params), strict=True):
            answer = output.outputs[0]
            # "length": the answer was cut at max_tokens. "error": output.error says why this prompt failed.
            print(json.dumps({"prompt": prompt, "answer": answer.text, "finish_reason": answer.finish_reason}))


if __name__ == "__main__":
    main()
