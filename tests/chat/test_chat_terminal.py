"""A chat on a pseudo-terminal."""

import json
import stat

from chatting import Chat
from rich.cells import cell_len

CTRL_C, CTRL_D, UP, ALT_ENTER = "\x03", "\x04", "\x1b[A", "\x1b\r"


def test_an_answer_streams_and_ctrl_c_ends_it_and_not_the_chat(tmp_path):
    with Chat(tmp_path) as chat:
        chat.ask("endless")
        chat.wait_for("word0")  # the answer has no end, so this is shown before it
        chat.wait_for("word20")
        chat.send(CTRL_C)
        chat.wait_for("50.0 tokens/s; bound by link; the first after 0.50 s; prompt 7, 3 of them from the cache; ended")
        chat.wait_for(">>>")
        chat.ask("are you there?")
        chat.wait_for("You: are you there?")
        chat.wait_for(">>>")
        assert "^C" not in chat.seen, "it would stand in the answer"
        chat.ask("interrupted")
        chat.wait_for("interrupted >>>")
        chat.send(CTRL_C)
        chat.wait_for("/exit or Ctrl-D ends the chat")
        chat.wait_for(">>>")
        chat.send(CTRL_D)
        chat.wait_for("ended well")


def test_a_message_that_is_typed_during_an_answer_is_the_next_one(tmp_path):
    with Chat(tmp_path) as chat:
        chat.ask("slow")
        chat.wait_for("word5")
        chat.ask("typed ahead")
        chat.wait_for("You: typed ahead")


def test_a_second_ctrl_c_ends_an_answer_that_does_not_stop(tmp_path):
    with Chat(tmp_path) as chat:
        chat.ask("deaf")
        chat.wait_for("word5")
        chat.send(CTRL_C)
        chat.wait_for("heard")
        chat.send(CTRL_C)
        chat.wait_for("ended by you")
        chat.wait_for(">>>")
        chat.ask("/exit")
        chat.wait_for("ended well")


def test_the_next_chat_has_the_history_and_nobody_else_reads_it(tmp_path):
    with Chat(tmp_path) as chat:
        chat.ask("a question of yesterday")
        chat.wait_for("You: a question of yesterday")
        chat.wait_for(">>>")
        chat.ask("/exit")
        chat.wait_for("ended well")
    assert stat.S_IMODE((tmp_path / "nanoinfer" / "chat_history").stat().st_mode) == 0o600
    with Chat(tmp_path) as chat:
        chat.send(UP + UP + "\r")  # the newest is /exit
        chat.wait_for("You: a question of yesterday")


def test_a_history_that_cannot_be_written_is_said_and_does_without(tmp_path):
    (tmp_path / "nanoinfer").write_text("not a directory")
    with Chat(tmp_path) as chat:
        assert "what you type is not kept for the next chat" in chat.seen
        chat.ask("hello")
        chat.wait_for("You: hello")


def test_save_and_load_and_messages_of_several_lines(tmp_path):
    with Chat(tmp_path) as chat:
        chat.send("one" + ALT_ENTER + "two\r")
        chat.wait_for("You: one")
        chat.wait_for(">>>")
        chat.send('"""\rthree\rfour\r"""\r')
        chat.wait_for("You: three")
        chat.wait_for(">>>")
        chat.ask("/save talk.json")
        chat.wait_for("saved 4 messages in talk.json")
        chat.wait_for(">>>")
        chat.ask("/laod talk.json")
        chat.wait_for("there is no command /laod (did you mean 'load'?)")
        chat.wait_for(">>>")
        chat.ask("/clear")
        chat.wait_for("begins anew")
        chat.wait_for(">>>")
        chat.ask("/load talk.json")
        chat.wait_for("loaded 4 messages from talk.json")
    said = [message["content"] for message in json.loads((tmp_path / "talk.json").read_text())]
    assert said == ["one\ntwo", "You: one\ntwo", "three\nfour", "You: three\nfour"]


def test_thinking_is_dim_and_markdown_is_drawn(tmp_path):
    with Chat(tmp_path) as chat:
        chat.ask("think")
        chat.wait_for("I have thought.")
        chat.wait_for(">>>")
        assert "<think>" not in chat.seen and "*thought*" not in chat.seen
        assert "\x1b[2mirs" in chat.raw, "thinking is not dim"  # it came in pieces of three letters
        chat.ask("markdown")
        chat.wait_for("the end <b>")  # tags are text
        chat.wait_for(">>>")
        assert "• one" in chat.seen and "**" not in chat.seen and "# A" not in chat.seen


def test_a_long_prompt_is_counted_until_the_answer_begins(tmp_path):
    with Chat(tmp_path) as chat:
        chat.ask("long")
        chat.wait_for("reading the prompt: 1,000 of 5,000 tokens")
        chat.wait_for("reading the prompt: 2,000 of 5,000 tokens")
        chat.wait_for("You: long")
        chat.wait_for(">>>")
        place = chat.raw.rindex("reading the prompt")
        assert "\x1b[2K" in chat.raw[place : chat.raw.index("You:", place)], "the line was not taken away"


def test_a_model_gives_the_terminal_no_orders(tmp_path):
    with Chat(tmp_path) as chat:
        chat.ask("orders")
        chat.wait_for("a[31mb")
        chat.wait_for("c[31md31mef")
        chat.wait_for(">>>")
        assert "\x1b[31m" not in chat.raw


def test_wide_characters_in_a_narrow_window(tmp_path):
    columns = 24
    question = "漢字は難しい。ひらがな、カタカナ！ 안녕 하세요 세계 and some more"
    with Chat(tmp_path, columns) as chat:
        chat.ask(question)
        chat.wait_for("You: ")
        chat.wait_for("bound by")
        chat.wait_for(">>>")
        answer = chat.lines[max(place for place, line in enumerate(chat.lines) if line.startswith("You:")) :]
        assert columns // 2 < max(cell_len(line) for line in answer) <= columns
        chat.ask("/save talk.json")
        chat.wait_for("saved")
    assert json.loads((tmp_path / "talk.json").read_text())[0]["content"] == question


def test_an_error_ends_no_chat_on_a_terminal(tmp_path):
    with Chat(tmp_path) as chat:
        chat.ask("nothing")
        chat.wait_for("the prompt has no room: raise max_model_len")
        chat.wait_for(">>>")
        chat.ask("/stats")
        chat.wait_for("0 messages")
        chat.wait_for("more of everything")
