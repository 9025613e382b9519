"""Texts that are far too long are refused before they are read to their end, whoever hands them in."""

import pytest
from engines import COMMON
from tiny_models import make_checkpoint
from trained_tokenizers import make_tokenizer

from nanoinfer import LLM, SamplingParams
from nanoinfer.requests import prompts

NUM_CHARS = 10**6
TOO_LONG = "the prompt is too long: at least .* tokens.*, and max_model_len="
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module", params=["llama 3", "mistral"])
def llm(request, tmp_path_factory):
    tokenizer = make_tokenizer(request.param)
    tokenizer.chat_template = TEMPLATE
    path = make_checkpoint("qwen3", tmp_path_factory.mktemp("model"), vocab_size=len(tokenizer), num_layers=1)
    tokenizer.save_pretrained(path)
    with LLM(path, **(COMMON | dict(skip_tokenizer_init=False, max_num_seqs=1))) as llm:
        yield llm


@pytest.fixture
def num_read(monkeypatch):
    """How many characters the tokenizer has read."""
    counted, encode = [0], prompts.encode

    def counting(tokenizer, text, **how):
        counted[0] += len(text)
        return encode(tokenizer, text, **how)

    monkeypatch.setattr(prompts, "encode", counting)
    return counted


def ways(llm) -> dict:
    text, params = "words " * (NUM_CHARS // 6), SamplingParams(max_tokens=1)
    message, how = {"role": "user", "content": "hello"}, dict(use_tqdm=False)
    template = "{{ 'words ' * %d }}" % (NUM_CHARS // 6) + TEMPLATE
    return {
        "generate": lambda: llm.generate([text], params, **how),
        "chat": lambda: llm.chat([message | {"content": text}], params, **how),
        "template": lambda: llm.chat([message], params, chat_template=template, **how),
    }


@pytest.mark.parametrize("way", ["generate", "chat", "template"])
def test_a_text_that_is_far_too_long_is_not_read_to_its_end(llm, num_read, way):
    with pytest.raises(ValueError, match=TOO_LONG):
        ways(llm)[way]()
    assert num_read[0] == prompts.LONG_CHARS


def test_a_long_text_has_the_tokens_of_the_whole(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.intake, "_max_model_len", 10**6)
    text, tokenizer = "some words; and 12 more.\n" * 1200, llm.get_tokenizer()
    assert len(text) > prompts.LONG_CHARS
    assert llm.engine.intake.tokenize(text) == tokenizer.encode(text)
    assert llm.engine.intake.tokenize(text, is_bare=True) == tokenizer.encode(text, add_special_tokens=False)
    message = [{"role": "user", "content": text}]
    for tokenize in (True, False):
        found = llm.engine.intake.tokenize_chat(
            lambda **how: tokenizer.apply_chat_template(message, **dict(return_dict=False) | how)
        )
        assert found == tokenizer.apply_chat_template(message, return_dict=False)
