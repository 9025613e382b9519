"""Switch between resident and offload mode in the midst of an answer, which does not change by one bit.

    python examples/switch_modes.py MODEL "Tell me about rivers."

A program does this, for example, to make room on the GPU for another one. `enable_cpu_offload="auto"` enters offload
mode by itself when the GPU is full.
"""

import argparse

from nanoinfer import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Switch modes while an answer is generated.")
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("prompt")
    options = parser.parse_args()

    params = SamplingParams(temperature=0.7, seed=1, max_tokens=48, ignore_eos=True)
    # Without the prefix cache the second run computes the whole prompt, as the first does.
    with LLM(options.model, enable_cpu_offload="auto", enable_prefix_caching=False) as llm:
        [output] = llm.generate(options.prompt, params, use_tqdm=False)
        without_switch = output.outputs[0].token_ids

        token_ids = []
        for delta in llm.generate_stream(options.prompt, params):
            print(delta.text_delta, end="", flush=True)
            token_ids += delta.token_ids_delta
            if len(token_ids) in (16, 32):
                llm.switch_mode("offload" if llm.mode == "resident" else "resident")
                print(f"[{llm.mode}]", end="")
        print("\nthe same tokens" if token_ids == without_switch else "\nother tokens")


if __name__ == "__main__":
    main()
