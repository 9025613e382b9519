"""Ask the server through OpenAI's client. Start the server first, in another terminal:

pip install -e '.[serve]' openai
nanoinfer serve MODEL --port 8000
python examples/openai_client.py MODEL "What is a KV cache?"
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a server and print its answer as it is generated.")
    parser.add_argument("model", help="as given to `nanoinfer serve`, or its --served-model-name")
    parser.add_argument("question")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="as given to `nanoinfer serve`")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()

    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    stream = client.chat.completions.create(
        model=options.model,
        messages=[{"role": "user", "content": options.question}],
        max_tokens=options.max_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 20},  # what vLLM has beside OpenAI's fields
    )
    for part in stream:
        if part.choices:
            print(part.choices[0].delta.content or "", end="", flush=True)
        else:  # the last part
            print(f"\n{part.usage.prompt_tokens} tokens in, {part.usage.completion_tokens} out")


if __name__ == "__main__":
    main()
