"""`nanoinfer chat` with a tiny model: through a pipe and on a terminal."""

import io
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from chatting import Terminal
from engines import COMMON
from serving import make_served_checkpoint

from nanoinfer import LLM, LLMEngine, SamplingParams
from nanoinfer.chat.engine_model import EngineModel
from nanoinfer.chat.session import Session
from nanoinfer.chat.settings import Settings
from nanoinfer.commands import main as cli
from nanoinfer.engine import ahead
from nanoinfer.parsers.events import Reasoning, Text
from nanoinfer.requests import chats

OPTIONS = [
    "--device",
    "cpu",
    "--dtype",
    "float32",
    "--block-size",
    "16",
    "--max-model-len",
    "256",
    "--temperature",
    "0",
]
ENGINE = COMMON | dict(skip_tokenizer_init=False, max_model_len=256)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
QUESTION = " ".join(f"w{i}" for i in range(20, 60))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(checkpoint):
    with LLM(checkpoint, **ENGINE) as llm:
        yield llm


def ask(session, question):
    answer = session.ask(question)
    list(answer)
    assert session.keep(question, answer)
    return answer


def test_answers_are_those_of_llm_chat_and_the_next_prompt_comes_from_the_cache(llm):
    session = Session(EngineModel(llm, "tiny"), Settings(GREEDY))
    first = ask(session, QUESTION)
    second = ask(session, "w9")
    messages = [{"role": "user", "content": QUESTION}]
    for answer in (first, second):
        (wanted,) = llm.chat(messages, GREEDY, use_tqdm=False)
        assert answer.text == wanted.outputs[0].text
        assert answer.report.num_prompt_tokens == len(wanted.prompt_token_ids)
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "w9"}]
    assert first.report.num_cached_tokens == 0 and second.report.num_cached_tokens == 32
    assert first.report.num_tokens == 40 and first.report.cut == "stopped at 40 tokens: /set max_tokens gives more"
    assert first.report.bound == "CPU" and first.report.tokens_per_second > 0
    assert "bound by CPU" in session.model.stats()["decode steps"]
    total = llm.engine.plan.block_bytes * llm.stats()["gpu_blocks_total"] / 2**20
    assert f" MiB of {total:.2f} MiB on the device, 0.00 MiB of " in session.model.stats()["KV cache"]


def test_while_it_waits_for_a_line_the_answer_is_computed_ahead(llm, monkeypatch):
    monkeypatch.setattr(ahead, "MAX_SECONDS", 1e9)
    monkeypatch.setattr(chats, "_MARKS", ("w98", "w99"))
    session, steps = Session(EngineModel(llm, "tiny"), Settings(GREEDY)), []
    with session.waiting():
        pass  # there is no answer yet
    ask(session, QUESTION)
    stopped = threading.Event()
    step = llm.engine.step
    monkeypatch.setattr(
        llm.engine, "step", lambda: (steps.append(threading.current_thread()), step(), stopped.set())[1]
    )
    with session.waiting():
        assert stopped.wait(10)
    assert threading.main_thread() not in steps and not llm.engine.has_work
    with session.waiting():
        deadline = time.monotonic() + 10
        while llm.engine.kv_cache.tables.gpu_blocks.num_cached < 83 // 16 and time.monotonic() < deadline:
            time.sleep(0.001)
    second = ask(session, "w9")
    assert second.report.num_cached_tokens == (41 + 41 + 1) // 16 * 16
    (cold,) = llm.chat([*session.conversation.messages[:-1]], GREEDY, use_tqdm=False)
    assert second.text == cold.outputs[0].text


def test_a_chat_drafts_where_nothing_streams_too(checkpoint):
    def texts(llm):
        session = Session(EngineModel(llm, "tiny"), Settings(replace(GREEDY, max_tokens=60)))
        return [ask(session, question).text for question in (QUESTION, QUESTION)]

    with LLM(checkpoint, **ENGINE) as llm:
        wanted = texts(llm)
    drafts = dict(speculative_config="auto", enable_cpu_offload="auto", host_memory_limit="64MiB", max_num_seqs=9)
    with LLM(checkpoint, **(ENGINE | drafts)) as llm:
        llm.generate([wanted[0]], GREEDY, use_tqdm=False)
        assert llm.engine.drafts.num_drafted == 0 and llm.mode == "resident"
        assert texts(llm) == wanted
        assert llm.engine.drafts.num_drafted > 0 and llm.mode == "resident"


def test_the_statistics_have_what_came_over_the_link_and_how_often_experts_were_there(llm, monkeypatch):
    model, found = EngineModel(llm, "tiny"), llm.stats()
    assert not {"streamed", "experts"} & set(model.stats())
    found |= dict(decode_streamed_bytes=3 * 2**30, link_gbps=12.5, expert_fetches=2, expert_hit_rate=0.75)
    monkeypatch.setattr(llm, "stats", lambda: found | dict(expert_fetched_bytes=2**30))
    assert model.stats()["streamed"] == "3.00 GiB at 12.5 GB/s"
    assert model.stats()["experts"] == "75% of the chosen ones were on the device, 1.00 GiB were brought there"


def test_an_answer_that_is_stopped_leaves_nothing_behind(llm):
    session = Session(EngineModel(llm, "tiny"), Settings(replace(GREEDY, max_tokens=None)))
    answer = session.ask(QUESTION)
    for place, _ in enumerate(answer):
        if place == 3:
            answer.stop()
    assert answer.report.cut == "ended by you" and 4 <= answer.report.num_tokens <= 6
    assert not llm.engine.has_work and llm.stats()["gpu_blocks_used"] == 0
    session.ask("w5")  # never read, as where an interrupt comes in between
    session.ask("w5")
    assert len(llm.engine.live.requests) == 1
    assert ask(session, "w6").report.cut == "stopped, the context of 256 tokens is full: /clear begins anew"
    assert not llm.engine.has_work


def test_what_the_engine_or_the_template_refuses_is_no_part_of_the_conversation(llm):
    session = Session(EngineModel(llm, "tiny"), Settings(GREEDY))
    with pytest.raises(
        ValueError, match="the prompt is too long: .* tokens, and max_model_len=256 .* raise max_model_len$"
    ):
        session.ask(QUESTION * 9)  # nothing was said before that could be forgotten
    llm.get_tokenizer().chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ValueError, match="the chat template refuses the messages: System role not supported"):
        session.ask("w1")
    assert not session.conversation.messages and not llm.engine.has_work
    llm.get_tokenizer().chat_template = None
    with pytest.raises(
        ValueError, match="tiny has no chat template: give one with --chat-template FILE, or have a text continued"
    ):
        EngineModel(llm, "tiny")


def test_a_full_context_names_the_command_that_empties_it(llm):
    """Whether it ends an answer, also one that may have no more tokens, or has no room for the next question."""
    session = Session(EngineModel(llm, "tiny"), Settings(GREEDY))
    question = " ".join([QUESTION] * 5)  # few tokens are left
    prompt = ask(session, question).report.num_prompt_tokens
    session.conversation.messages.clear()
    full = "stopped, the context of 256 tokens is full: /clear begins anew"
    for limit in (256 - prompt, 500, None):
        session.conversation.messages.clear()
        session.settings = replace(session.settings, params=replace(GREEDY, max_tokens=limit))
        assert ask(session, question).report.cut == full, limit
    with pytest.raises(ValueError, match="the prompt is too long: .* or raise max_model_len; /clear begins anew"):
        session.ask("w9")
    session.settings = Settings(replace(GREEDY, max_tokens=255 - prompt))
    session.conversation.messages.clear()
    assert ask(session, question).report.cut == f"stopped at {255 - prompt} tokens: /set max_tokens gives more"


def test_markers_that_are_special_tokens_are_seen(llm):
    tokenizer = llm.get_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}{# [THINK] #}"
    assert not EngineModel(llm, "tiny").format.sees_special(with_tools=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]", "w11"]})
    model = EngineModel(llm, "tiny")
    assert model.format.sees_special(with_tools=False)
    run = model.run([{"role": "user", "content": "w1"}], Settings(GREEDY))
    assert not llm.engine.live.requests["chat-0"].params.skip_special_tokens
    assert model.format.parser(run.prompt).push("[THINK]x w11[/THINK]y") == [Reasoning("x "), Text("y")]
    llm.engine.abort("chat-0")


def test_a_pipe_gets_the_answer_of_the_command(checkpoint, llm, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("/set ignore_eos true\nw5 w6\n"))
    given = ["--max-tokens", "4", "--system", "w7", "--chat-template-kwargs", '{"loud": true}']
    assert cli.main(["chat", str(checkpoint), *OPTIONS, *given]) == 0
    messages = [{"role": "system", "content": "w7"}, {"role": "user", "content": "w5 w6"}]
    params = replace(GREEDY, max_tokens=4)
    (wanted,) = llm.chat(messages, params, use_tqdm=False, chat_template_kwargs={"loud": True})
    captured = capsys.readouterr()
    assert captured.out == wanted.outputs[0].text + "\n" and "4 tokens;" in captured.err


def test_a_pipe_ends_at_an_error_in_the_words_of_the_command(checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO(QUESTION * 9 + "\n"))
    assert cli.main(["chat", str(checkpoint), *OPTIONS]) == 2
    assert "--max-model-len 256 leaves" in capsys.readouterr().err


def test_wrong_options_are_refused_before_the_model_is_loaded(monkeypatch, capsys):
    for given, said in (
        (["--temperature", "-1"], "--temperature is -1"),
        (["--chat-template-kwargs", "7"], "--chat-template-kwargs must be an object in JSON"),
    ):
        assert cli.main(["chat", "no-such-model", *given]) == 2
        assert said in capsys.readouterr().err


@contextmanager
def on(terminal):
    """Run what the process does on this terminal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
        with open(terminal.slave, closefd=False) as stdin, open(terminal.slave, "w", closefd=False) as stdout:
            for name, file in (("stdin", stdin), ("stdout", stdout), ("stderr", stdout)):
                patch.setattr(sys, name, file)
            yield


@pytest.mark.parametrize("package", ["prompt_toolkit", "rich"])
def test_without_the_extra_the_command_says_which_one(package, monkeypatch):
    for name in ("nanoinfer.chat.terminal", "nanoinfer.chat.markdown"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    terminal = Terminal()
    with on(terminal):
        assert cli.main(["chat", "no-such-model"]) == 2
    terminal.wait_for(f"nanoinfer chat: {package} is not installed: in the clone, pip install -e '.[chat]'")
    terminal.close()


def test_on_a_terminal_the_command_streams_and_ctrl_c_ends_an_answer(checkpoint, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found, terminal, has_ended = [], Terminal(), threading.Event()
    steps, step = [], LLMEngine.step

    def interrupted_step(engine):
        steps.append(engine)
        if len(steps) == 7:  # this terminal is not the one that controls the process
            signal.raise_signal(signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted_step)

    def user():
        try:
            terminal.wait_for(">>>")
            terminal.send("/set ignore_eos TRUE\r")
            terminal.wait_for("ignore_eos true")
            terminal.wait_for(">>>")
            terminal.send("w5\r")
            found.append(terminal.wait_for("ended by you"))
            terminal.wait_for(">>>")
            terminal.send("/stats\r")
            found.append(terminal.wait_for("there is no GPU"))
            terminal.wait_for(">>>")
            terminal.send("\x04")
        except BaseException as error:
            found.append(error)
        finally:
            while not has_ended.wait(0.1):  # again where something went wrong
                terminal.send("\x03\x04")

    thread = threading.Thread(target=user)
    thread.start()
    with on(terminal):
        try:
            assert cli.main(["chat", str(checkpoint), *OPTIONS]) == 0
        finally:
            has_ended.set()
            thread.join()
    terminal.close()
    assert [type(part) for part in found] == [str, str], found
    assert (
        len(steps) <= 9 and "; ended by you" in found[0] and "tiny" not in found[1] and "context 256 tokens" in found[1]
    )
