"""Talk with a model: each line that you type is a message, an empty one ends.

python examples/chat.py MODEL --system "Answer in one sentence."

It is where a program of one's own begins; for talking, `nanoinfer chat MODEL` has more: answers as they are generated,
history, settings, thinking kept apart.
"""

import argparse

from nanoinfer import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description="Talk with a model in the terminal.")
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--max-tokens", type=int, default=512, help="tokens of an answer")
    options = parser.parse_args()

    messages = [{"role": "system", "content": options.system}] if options.system else []
    with LLM(options.model, enable_cpu_offload="auto", max_num_seqs=1) as llm:
        params = llm.get_default_sampling_params()  # what the checkpoint recommends
        params.max_tokens = options.max_tokens
        while text := ask():
            messages.append({"role": "user", "content": text})
            # The whole conversation is the prompt. What was computed in the turns before comes from the prefix cache.
            [output] = llm.chat(messages, params, use_tqdm=False)
            answer = output.outputs[0].text
            print(answer.strip())
            messages.append({"role": "assistant", "content": answer})


def ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    main()
