"""Templates that models are published with: a chat of three turns asks the model what transformers would ask it.

`make templates-test TEMPLATES=DIR` does the same with every template of a folder.
"""

import copy
import re

import pytest
from template_chats import OWN, AnswersByHeart, templates
from trained_tokenizers import make_tokenizer

from nanoinfer.chat.engine_model import EngineModel
from nanoinfer.chat.session import Session
from nanoinfer.chat.settings import Settings

TEMPLATES = templates()
# How models write an answer, by a text that stands in the templates of those that have another form than the usual one.
FORMS = {
    "<|channel|>analysis": "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}",
    "<|channel>thought": "<|channel>thought\n{}<channel|>{}",
    "<seed:think>": "<seed:think>\n{}\n</seed:think>\n\n{}",
    "<mm:think>": "<mm:think>{}</mm:think>{}",
    "<|START_THINKING|>": "<|START_THINKING|>{}<|END_THINKING|><|START_RESPONSE|>{}<|END_RESPONSE|>",
    "[THINK]": "[THINK]{}[/THINK]{}",
    "<thinking>": "<thinking>\n{}\n</thinking>\n{}",
}
USUAL = "<think>\n{}\n</think>\n\n{}"
SPECIAL = re.compile(r"<\|[\w ]+\|>|<\|?/?[\w:]+\|?>|\[/?\w+\]")
# Where templates look for what was thought.
FIELDS = ("reasoning_content", "reasoning", "thinking", "thought")
TURNS = [(f"Question {n}?", f"Pondered {n}.", f"Answer {n}.") for n in (1, 2, 3)]
VARIABLES = {"default": {}} | {
    mode: {name: mode == "on" for name in ("enable_thinking", "thinking")} for mode in ("on", "off")
}
# Of the models here, those whose template leaves what was thought in the prompt.
KEEP = {"ByteDance-Seed-OSS"}
REFUSES = "no-system-role"


@pytest.fixture(scope="module")
def plain():
    tokenizer = make_tokenizer("qwen")
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    return tokenizer


def histories(system, thoughts):
    """What each of three prompts holds; `thoughts` makes an answer of its thought and its text."""
    said = [] if system is None else [{"role": "system", "content": system}]
    for question, thought, answer in TURNS:
        said = [*said, {"role": "user", "content": question}]
        yield said
        said = [*said, {"role": "assistant", **thoughts(thought, answer)}]


def in_parts(said):
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in said]


def reads_parts(tokenizer):
    """Whether contents must be lists of parts."""
    said = [{"role": "user", "content": "Q?"}]
    texts = (tokenizer.apply_chat_template(form(said), tokenize=False) for form in (list, in_parts))
    return "Q?" not in next(texts) and "Q?" in next(texts)


def as_transformers(tokenizer, system, form, mode):
    """Whether the model thinks, and the text of each prompt: thoughts are in a field where the template reads one, else
    in the content if the template takes them out of it; a template that would only repeat them gets none.
    """

    prepared = in_parts if reads_parts(tokenizer) else list

    def rendered(said, **arguments):
        said = prepared(said)
        return tokenizer.apply_chat_template(said, tokenize=False, **arguments, **VARIABLES[mode])

    def prompts(thoughts):
        return [rendered(said, add_generation_prompt=True) for said in histories(system, thoughts)]

    def in_fields(thought, answer):
        return {"content": answer, **dict.fromkeys(FIELDS, thought)}

    without = prompts(lambda thought, answer: {"content": answer})
    begin, end = (part.strip() for part in re.match(r"(.*?)\{\}(\s*\S+?)(?=\{|<|\s|$)", form, re.DOTALL).groups())
    opens, closes = (without[0].rstrip().endswith(marker) for marker in (begin, end))
    if not opens and (mode == "off" or closes):
        return False, without
    with_fields = prompts(in_fields)
    asked = {"role": "user", "content": "Q?"}
    newest = [rendered([asked, {"role": "assistant", "content": "A.", **own}]) for own in ({}, in_fields("T.", "A."))]
    if with_fields != without or newest[0] != newest[1]:
        return True, with_fields
    in_content = prompts(lambda thought, answer: {"content": form.format(thought, answer)})
    is_repeated = in_content[-1].count("Pondered") == len(TURNS) - 1
    return True, without if is_repeated else in_content


def is_whole(prompt, system):
    """Whether all but what was thought is in the last prompt."""
    said = [text for question, _, answer in TURNS for text in (question, answer)][:-1]
    return all(text in prompt for text in [*said, *([system] if system else [])])


def chat(tokenizer, system, answers, variables):
    """The prompts' token ids, and the conversation."""
    llm = AnswersByHeart(tokenizer, answers)
    session = Session(EngineModel(llm, "model"), Settings(variables=variables), system)
    for question, _, _ in TURNS:
        answer = session.ask(question)
        list(answer)
        assert session.keep(question, answer)
    return llm.prompts, session.conversation.messages


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("mode", VARIABLES)
def test_a_published_template_is_rendered_as_transformers_does_or_refuses_with_its_own_words(name, mode, plain):
    template, variables = TEMPLATES[name].read_text(), VARIABLES[mode]
    form = next((form for text, form in FORMS.items() if text in template), USUAL)
    is_own = TEMPLATES[name].parent == OWN
    marked = copy.deepcopy(plain)
    marked.add_special_tokens({"additional_special_tokens": SPECIAL.findall(form)})
    for tokenizer in (plain, marked):
        tokenizer.chat_template = template
        for system in (None, "Be brief."):
            try:
                thinks, wanted = as_transformers(tokenizer, system, form, mode)
                words = None if is_whole(wanted[-1], system) else r"messages\[0\] .* would not be in the prompt, as the"
            except Exception as error:
                words = re.escape(f"the chat template refuses the messages: {error}")
            if words is not None:
                assert not is_own or name == REFUSES and system is not None
                with pytest.raises(ValueError, match=words):
                    chat(tokenizer, system, [answer for _, _, answer in TURNS], variables)
                continue
            answers = [form.format(thought, answer) if thinks else answer for _, thought, answer in TURNS]
            prompts, said = chat(tokenizer, system, answers, variables)
            assert [tokenizer.decode(ids) for ids in prompts] == wanted
            assert prompts == [tokenizer.encode(text, add_special_tokens=False) for text in wanted]
            for message, (_, thought, answer) in zip(said[1::2], TURNS, strict=True):
                thought = {"reasoning_content": thought} if thinks else {}
                assert message == {"role": "assistant", "content": answer, **thought}
            assert not is_own or name != REFUSES or system is None
            if is_own and thinks:
                assert ("Pondered" in wanted[-1]) == (name in KEEP)
