"""Commands, settings, files, and what is kept of answers; without a terminal and without an engine."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from chatting import TEMPLATE, ScriptedModel
from rich.console import Console

from nanoinfer.chat.commands import EndOfChat, run
from nanoinfer.chat.conversation import Conversation, state_directory
from nanoinfer.chat.loop import converse
from nanoinfer.chat.markdown import MarkdownStream, split_blocks
from nanoinfer.chat.screens import PlainScreen
from nanoinfer.chat.session import Report, Session
from nanoinfer.chat.settings import Settings
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.thinking import HARMONY
from nanoinfer.sampling_params import SamplingParams


@pytest.fixture
def session():
    return Session(ScriptedModel(), Settings())


def ask(session, question):
    answer = session.ask(question)
    pieces = list(answer)
    return pieces, session.keep(question, answer)


def talk(session, text):
    """What a pipe with these lines gets: answers, notes, and whether all went well."""
    answers, notes = io.StringIO(), io.StringIO()
    has_ended_well = converse(session, PlainScreen(io.StringIO(text), answers, notes), stops_answers=False)
    return answers.getvalue(), notes.getvalue(), has_ended_well


def test_thinking_is_kept_beside_the_answer_and_given_to_the_template(session):
    assert ask(session, "think")[1] and ask(session, "next")[1]
    assert session.conversation.messages[1] == {
        "role": "assistant", "content": "I have *thought*.", "reasoning_content": "first this, then that"
    }  # fmt: skip
    assert session.model.asked[1] == [*session.conversation.messages[:2], {"role": "user", "content": "next"}]
    assert session.total_tokens == session.last.num_tokens + 19


def test_an_answer_that_was_ended_early_is_kept_and_one_of_thinking_alone_is_not(session):
    answer = session.ask("endless")
    for _ in answer:
        answer.stop()
    assert session.keep("endless", answer) and session.conversation.messages[1]["content"] == "word0 "
    answer = session.ask("think")
    pieces = iter(answer)
    next(pieces)
    pieces.close()
    assert answer.thought and not session.keep("think", answer) and len(session.conversation.messages) == 2


def test_system_clear_and_exit(session):
    assert run("/system", session) == "there is no system prompt"
    run("/system Be brief.\nBe kind.", session)
    ask(session, "hello")
    assert session.model.asked[0][0] == {"role": "system", "content": "Be brief.\nBe kind."}
    assert run("/system", session) == "Be brief.\nBe kind."
    assert "same system prompt" in run("/clear", session)
    assert session.conversation == Conversation("Be brief.\nBe kind.")
    run('/system ""', session)
    assert session.conversation.system is None
    for name in ("/exit", "/quit", "/bye"):
        with pytest.raises(EndOfChat):
            run(name, session)


def test_help_lists_every_command_and_an_unknown_one_names_the_nearest(session):
    shown = run("/help", session)
    assert all(f"/{name}" in shown for name in ("help", "clear", "system", "save", "load", "stats", "set", "exit"))
    with pytest.raises(ValueError, match=r"no command /sytem \(did you mean 'system'\?\)"):
        run("/sytem x", session)
    with pytest.raises(ValueError, match="a message that begins with / takes a space before it"):
        run("/etc/hosts is what?", session)
    for name in ("/save", "/load"):
        with pytest.raises(ValueError, match="needs the name of a file"):
            run(name, session)


def test_set_takes_fields_of_sampling_params_and_variables_of_the_template(session):
    cases = {
        "temperature 0.7": ("temperature", 0.7),
        "top-k=5": ("top_k", 5),
        "stop 7": ("stop", ("7",)),
        'stop ["a", "b"]': ("stop", ("a", "b")),
        "stop none": ("stop", None),
        "max_tokens none": ("max_tokens", None),
        "ignore_eos true": ("ignore_eos", True),
        "bad_words sure": ("bad_words", ("sure",)),
        'bad-words ["sure", "7"]': ("bad_words", ("sure", "7")),
        'logit_bias {"5": -200}': ("logit_bias", {5: -100.0}),
        "logit_bias none": ("logit_bias", None),
    }
    for text, (name, value) in cases.items():
        run(f"/set {text}", session)
        assert (getattr(session.settings.params, name) or None) == (value or None), text
    run('/set chat_template_kwargs {"enable_thinking": false}', session)
    assert session.settings.variables == {"enable_thinking": False}
    shown = run("/set", session).splitlines()
    assert "temperature          0.7" in shown and "seed                 none" in shown


@pytest.mark.parametrize(
    "text, said",
    [
        ("temprature 1", r"'temprature' is not known \(did you mean 'temperature'\?\)"),
        ("temp 1", r"did you mean 'temperature'\?"),
        ("num_predict 1", r"did you mean 'max_tokens'\?"),
        ("n 2", "'n' is not known"),
        ("parameter num_ctx 8192", "'num_ctx' is set when a model is loaded: begin the chat with --max-model-len"),
        ("format json", "there is no setting 'format' here: a request to nanoinfer serve may have response_format"),
        ("verbose", "there is no setting 'verbose' here: a line below each answer has its figures"),
        ("temperature -1", "temperature is -1"),
        ("temperature", "needs a value, such as /set temperature 0.7"),
        ("chat_template_kwargs 7", "must be an object in JSON"),
    ],
)
def test_a_wrong_setting_changes_nothing(session, text, said):
    before = session.settings
    with pytest.raises(ValueError, match=said):
        run(f"/set {text}", session)
    assert session.settings is before


def test_a_saved_conversation_is_a_list_of_messages_and_comes_back(session, tmp_path):
    file = tmp_path / "talk.json"
    run("/system 漢字", session)
    ask(session, "think")
    run(f"/save {file}", session)
    run(f"/save {file}", session)  # over itself
    saved = json.loads(file.read_text())
    assert [message["role"] for message in saved] == ["system", "user", "assistant"] and "漢字" in file.read_text()
    other = Session(ScriptedModel(), Settings())
    assert run(f"/load {file}", other) == f"loaded 2 messages from {file}, and a system prompt"
    assert other.conversation == session.conversation
    file.write_text(json.dumps({"model": "x", "messages": saved}))
    assert Conversation.load(file) == session.conversation
    assert [path.name for path in tmp_path.iterdir()] == ["talk.json"]


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "it is no JSON"),
        ("[]", "must hold a list of messages"),
        ('[{"role": "tool", "content": "x"}]', "message 0 has role 'tool': choose from system, user, assistant"),
        ('[{"role": "user", "content": [1]}]', r"message 0 has content \[1\]: give text"),
        ('[{"role": "user", "content": "x"}]', "each question of the user must have one answer"),
        ('["x"]', "message 0 has role None"),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "only the first one may be"),
    ],
)
def test_a_file_that_is_no_conversation_is_refused_and_not_overwritten(session, tmp_path, content, said):
    file = tmp_path / "talk.json"
    file.write_text(content)
    ask(session, "hello")
    before = [*session.conversation.messages]
    with pytest.raises(ValueError, match=said):
        run(f"/load {file}", session)
    assert session.conversation.messages == before
    with pytest.raises(ValueError, match="is there and is no conversation: give another name"):
        run(f"/save {file}", session)
    assert file.read_text() == content


def test_a_conversation_that_cannot_be_saved_names_the_file_that_was_asked_for(session, tmp_path):
    (tmp_path / "file").write_text("")
    for file in (tmp_path / "none" / "talk.json", tmp_path / "file" / "talk.json"):
        with pytest.raises(OSError, match=r"talk\.json'$") as caught:
            run(f"/save {file}", session)
        assert caught.value.filename == str(file)


def test_a_pipe_gets_plain_answers_and_nothing_else(session, tmp_path):
    text = f'/set temperature 0\n\nmarkdown\n"""\none\n\ntwo\n"""\nthink\n/save {tmp_path / "x"}\n/exit\nnever asked'
    answers, notes, has_ended_well = talk(session, text)
    assert answers == (
        "# A title\n\n- **one**\n- two\n\nthe end <b>\n\nYou: one\n\ntwo\n"
        "<think>\nfirst this, then that\n</think>\n\nI have *thought*.\n"
    )
    assert has_ended_well and "50.0 tokens/s; bound by link" in notes and "saved 6 messages" in notes


def test_the_first_error_ends_a_pipe(session):
    answers, notes, has_ended_well = talk(session, "/set temperature x\nnever asked\n")
    assert not has_ended_well and not answers and notes.startswith("nanoinfer chat: temperature is 'x'")
    assert not talk(session, "nothing\nnever asked\n")[2] and not session.conversation.messages


def test_a_pipe_ends_at_ctrl_c_and_where_nobody_reads_on(session):
    with pytest.raises(KeyboardInterrupt):
        talk(session, "interrupted\n")
    answers = io.StringIO()
    answers.flush = lambda: (_ for _ in ()).throw(BrokenPipeError)
    with pytest.raises(BrokenPipeError):  # which the command ends at without a word
        converse(session, PlainScreen(io.StringIO("hello\n"), answers, io.StringIO()), stops_answers=False)


def test_the_history_lies_in_the_state_directory_of_the_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    for given, wanted in (
        ("/state", "/state"),
        ("", "/home/somebody/.local/state"),
        ("x", "/home/somebody/.local/state"),
    ):
        monkeypatch.setenv("XDG_STATE_HOME", given)
        assert state_directory() == Path(wanted) / "nanoinfer"


def test_a_report_leaves_out_what_is_not_known():
    assert Report(1, None, None, 9, 0, None, None).line() == "1 token; prompt 9 (the cache holds blocks of 256)"
    assert Report(1, None, None, 99, 0, None, None, 16).line() == "1 token; prompt 99, 0 of them from the cache"


# What may be said again, or forgotten


class Varied(ScriptedModel):
    """Answers each time with another number; not at all where it is asked for the third time."""

    def run(self, messages, settings):
        run = super().run([*messages[:-1], {"role": "user", "content": messages[-1]["content"]}], settings)
        run._question = "nothing" if len(self.asked) == 3 else f"number {len(self.asked)}"
        return run


def test_the_last_question_is_asked_again_and_its_answer_replaced_where_there_is_another():
    session = Session(Varied(), Settings())
    _, notes, has_ended_well = talk(session, "hello\n/regenerate\n/regenerate\n")
    assert not has_ended_well, "the third answer failed"
    assert [one["content"] for one in session.conversation.messages] == ["hello", "You: number 2"]
    assert session.model.asked == [[{"role": "user", "content": "hello"}]] * 3
    assert "the same answer comes" not in notes
    for setting, why in (("temperature 0", "temperature is 0"), ("seed 5", "seed is set")):
        _, notes, _ = talk(Session(Varied(), Settings()), f"/set {setting}\nhello\n/regenerate\n")
        assert f"{why}: the same answer comes; /set {why.split()[0]} changes that" in notes


def test_the_last_question_is_forgotten_with_its_answer(session):
    ask(session, "one")
    ask(session, "two")
    assert run("/undo", session).endswith("2 messages before them")
    assert [one["content"] for one in session.conversation.messages] == ["one", "You: one"]
    assert run("/undo", session).endswith("0 messages before them")
    for command in ("/undo", "/regenerate"):
        with pytest.raises(ValueError, match="nothing was said yet"):
            run(command, session)


@pytest.mark.parametrize(
    "template, off",
    [
        (TEMPLATE, {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}),
        (HARMONY, {"reasoning_effort": "low"}),
    ],
)
def test_thinking_is_switched_by_a_word(template, off, session):
    session.model.format = AnswerFormat.of(template)
    run('/set chat_template_kwargs {"other": 1, "enable_thinking": true}', session)
    assert run("/set nothink", session) == "the model is told not to think"
    assert session.settings.variables == {"enable_thinking": True, "other": 1} | off
    run("/set think", session)
    assert "other" in session.settings.variables and not off.keys() & session.settings.variables.keys()
    session.model.format = AnswerFormat.of("")
    with pytest.raises(ValueError, match="says nothing of thinking, so there is nothing to switch"):
        run("/set nothink", session)


def test_set_takes_what_follows_it_in_ollama(session):
    run("/set system Be a = b.", session)
    assert session.conversation.system == "Be a = b." == run("/set system", session)
    assert run("/set parameter temperature 0.5", session).split() == ["temperature", "0.5"]
    assert session.settings.params.temperature == 0.5
    with pytest.raises(ValueError, match="'num_predict' is not known .did you mean 'max_tokens'"):
        run("/set parameter num_predict 5", session)


def test_blocks_of_markdown_are_finished_when_nothing_can_change_them():
    assert split_blocks("one\n\ntw") == ("", "one\n\ntw")  # "2" may become a number of a list
    assert split_blocks("one\n\ntwo\n") == ("one\n", "two\n")
    assert split_blocks("1. a\n\n2") == ("", "1. a\n\n2")
    assert split_blocks("1. a\n\n2. b\n\nend\n") == ("1. a\n\n2. b\n", "end\n")
    assert split_blocks("| a |\n|---|\n| 1 |\n") == ("", "| a |\n|---|\n| 1 |\n")
    assert split_blocks("```\ncode\n\nmore\n") == ("", "```\ncode\n\nmore\n")
    text = "# T\n\npara\n- x\n- y\n\n> q\n\n```\nc\n```\nend\n"
    finished, rest = split_blocks(text)
    assert f"{finished}\n{rest}" == text and rest == "end\n"


@pytest.mark.parametrize("size", [1, 5, 99])
def test_blocks_are_drawn_once_with_one_empty_line_between_them(size):
    file = io.StringIO()
    stream = MarkdownStream(Console(file=file, width=20))
    text = "one [x](http://y)\n\n- **a**\n- b\n\n\n1. c\n\n2. d\n\n<b>end</b>"
    for begin in range(0, len(text), size):
        stream.feed(text[begin : begin + size])
    stream.end()
    shown = "\n".join(line.rstrip() for line in file.getvalue().splitlines())
    assert shown == "one x (http://y)\n\n • a\n • b\n\n 1 c\n 2 d\n\n<b>end</b>"


def test_a_block_that_changes_never_has_more_lines_than_the_window():
    file = io.StringIO()
    stream = MarkdownStream(Console(file=file, width=20, height=6, force_terminal=True, color_system=None))
    for number in range(30):
        stream.feed(f"- item{number}\n")
        stream.draw()
    drawn = file.getvalue()
    assert "item29" in drawn and "\x1b[1A" * 4 not in drawn.replace("\x1b[2K", ""), "more than 4 lines are drawn over"
    stream.end()
    assert all(f"item{number}" in file.getvalue()[len(drawn) :] for number in range(30))


def test_a_chat_without_an_engine_imports_no_torch():
    code = "import sys, nanoinfer.chat.terminal, nanoinfer.chat.loop; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2]).returncode == 0


def test_defaults_have_no_limit_of_tokens():
    assert Settings().params == SamplingParams(max_tokens=None)
