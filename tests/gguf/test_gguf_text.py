"""A file is prompted with text and answers with text, by its own tokenizer, template and end tokens."""

import pytest
from gguf_models import write_gguf
from tiny_models import make_checkpoint

from nanoinfer import LLM, SamplingParams

LETTERS = "▁abcdefghijklmnopqrstuvwxyz"
MORE = ["<unk>", "<s>", "</s>", "<|im_end|>"]
TOKENS = MORE + list(LETTERS) + [f"w{number}" for number in range(160 - len(MORE) - len(LETTERS))]
FILE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [-float(at) for at in range(160)],
    "tokenizer.ggml.token_type": [2, 3, 3, 3] + [1] * 156,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}<|im_end|>",
}
OPTIONS = dict(device="cpu", dtype="float32", block_size=16, max_model_len=64, progress_bar=False)
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(tmp_path, **extra):
    return write_gguf("llama", make_checkpoint("llama", tmp_path / "hf"), tmp_path / "model.gguf", **extra)


def test_a_file_answers_text_and_messages(tmp_path):
    with LLM(written(tmp_path, **FILE), **OPTIONS) as llm:
        answer = llm.generate("ab c", PARAMS, use_tqdm=False)[0]
        assert [TOKENS[at] for at in answer.prompt_token_ids] == ["<s>", *"▁ab▁c"]
        chat = llm.chat([{"role": "user", "content": "ab"}], PARAMS, use_tqdm=False)[0]
        assert [TOKENS[at] for at in chat.prompt_token_ids] == ["<s>", *"▁ab", "<|im_end|>"]
        by_ids = llm.generate({"prompt_token_ids": answer.prompt_token_ids}, PARAMS, use_tqdm=False)[0]
        assert by_ids.outputs[0].token_ids == answer.outputs[0].token_ids
        assert answer.outputs[0].text == llm.get_tokenizer().decode(
            answer.outputs[0].token_ids, skip_special_tokens=True
        )


def test_what_the_file_does_not_name_ends_an_answer_too(tmp_path):
    """The metadata has `eos` alone; <|im_end|> is an end by its text."""
    path = written(tmp_path, **FILE)
    with LLM(path, **OPTIONS) as llm:
        first = (
            llm.generate("ab", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids[0]
        )
    swapped = list(TOKENS)
    swapped[first], swapped[3] = swapped[3], swapped[first]
    for kind, reason in ((3, "stop"), (1, "length")):
        tokens = [token if kind == 3 else token.replace("im_end", "other") for token in swapped]
        again = write_gguf("llama", tmp_path / "hf", path, **FILE | {"tokenizer.ggml.tokens": tokens})
        with LLM(again, **OPTIONS) as llm:
            prompt = {"prompt_token_ids": [1, 4, 5, 6]}
            answer = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)[0].outputs[0]
            assert answer.token_ids[0] == first and answer.finish_reason == reason


def test_a_file_without_a_tokenizer_runs_on_token_ids(tmp_path):
    with LLM(written(tmp_path), **OPTIONS) as llm:
        assert len(llm.generate({"prompt_token_ids": [5, 6]}, PARAMS, use_tqdm=False)[0].outputs[0].token_ids) == 6
        with pytest.raises(ValueError, match="there is no tokenizer"):
            llm.generate("ab", PARAMS, use_tqdm=False)


def test_a_tokenizer_that_is_unknown_is_refused_unless_it_is_not_wanted(tmp_path):
    path = written(tmp_path, **FILE | {"tokenizer.ggml.model": "t5"})
    with pytest.raises(ValueError, match="tokenizer.ggml.model is 't5'.*skip_tokenizer_init"):
        LLM(path, **OPTIONS)
    with LLM(path, skip_tokenizer_init=True, **OPTIONS) as llm:
        assert llm.generate({"prompt_token_ids": [5, 6]}, PARAMS, use_tqdm=False)[0].outputs[0].token_ids


def test_a_template_may_be_given_in_a_file(tmp_path):
    path = written(tmp_path, **{key: value for key, value in FILE.items() if key != "tokenizer.chat_template"})
    messages = [{"role": "user", "content": "ab"}]
    with (
        LLM(path, **OPTIONS) as llm,
        pytest.raises(ValueError, match="no chat template: give a file with chat_template="),
    ):
        llm.chat(messages, PARAMS, use_tqdm=False)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}c")
    with LLM(path, chat_template=template, **OPTIONS) as llm:
        answer = llm.chat(messages, PARAMS, use_tqdm=False)[0]
        assert [TOKENS[at] for at in answer.prompt_token_ids] == [*"▁abc"]
    template.write_bytes(b"\xff")
    for unreadable in (template, tmp_path / "none", tmp_path, "{{ messages }}" * 1000, "a\0b"):
        with pytest.raises(
            ValueError, match="chat_template '.* cannot be read .*give a file with a template"
        ) as raised:
            LLM(path, chat_template=unreadable, **OPTIONS)
        assert len(str(raised.value)) < 400
    with pytest.raises(ValueError, match="chat_template=3 must be the path of a file"):
        LLM(path, chat_template=3, **OPTIONS)
