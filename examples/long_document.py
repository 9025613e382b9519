"""Ask questions about a document whose KV cache is larger than the GPU.

    python examples/long_document.py MODEL book.txt "Who is the narrator?" "Where does it end?" --gpu-memory-limit 10GiB

The document is read once: each further question finds it in the prefix cache. Its KV blocks lie in host memory, and
what the GPU does not hold streams through it in each step.
"""

import argparse
import sys

from tqdm import tqdm

from nanoinfer import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask questions about a long document.")
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("document", help="text file")
    parser.add_argument("questions", nargs="+")
    parser.add_argument("--gpu-memory-limit", help='such as "10GiB"; default: what is free')
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens of an answer")
    options = parser.parse_args()

    with open(options.document, encoding="utf-8") as file:
        document = file.read()
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    limits = dict(gpu_memory_limit=options.gpu_memory_limit, max_num_seqs=1)
    with LLM(options.model, enable_cpu_offload=True, **limits) as llm:
        for number, question in enumerate(options.questions):
            messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
            prompt = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            print(f"\n{question}")
            answer(llm, str(number), prompt, params)
        stats = llm.stats()
        print(
            f"\n{stats['prefix_cache_hit_tokens']:,} prompt tokens from the cache, "
            f"{stats['streamed_bytes'] / 2**20:,.0f} MiB streamed; {stats['advice']}",
            file=sys.stderr,
        )


def answer(llm: LLM, name: str, prompt: list[int], params: SamplingParams) -> None:
    """Print the answer as it is generated and, before it begins, how much of the prompt is read.

    `llm.generate_stream` does the same in one loop, but is silent until the first token.
    """
    request = llm.engine.add_request(name, prompt, params)
    before = llm.stats()["num_prefill_tokens"]
    bar = tqdm(total=len(prompt), desc="read", unit=" tokens")
    while llm.engine.has_work:
        outputs = llm.engine.step()  # at most max_num_batched_tokens tokens of the prompt, or a token of the answer
        num_read = request.metrics().num_cached_tokens + llm.stats()["num_prefill_tokens"] - before
        bar.update(num_read - bar.n)
        for output in outputs:
            bar.close()
            print(output.text_delta, end="", flush=True)
            if output.error:
                sys.exit(output.error)
    print()


if __name__ == "__main__":
    main()
