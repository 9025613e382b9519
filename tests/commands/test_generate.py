"""`nanoinfer generate`: where the prompt comes from, what is sampled, and what is said at the end."""

import io
import json
import re
import threading
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

import nanoinfer
from nanoinfer.commands import generate
from nanoinfer.commands.main import main
from nanoinfer.common.progress import PromptProgress
from nanoinfer.outputs import RequestMetrics, StreamOutput
from nanoinfer.sampling_params import SamplingParams

SPOKEN = "Records. The pass key of Mira Holt is 48192."


class FakeLLM:
    """Says two words to every prompt, and keeps what it was asked."""

    asked, said, is_long, is_watched = None, ("two", " words"), False, {}
    reason, context, template = "stop", 2048, None

    def __init__(self, model, **arguments):
        self.arguments = arguments
        self.num_looks, self.is_read = 0, threading.Event()
        self.engine = SimpleNamespace(
            sampling_defaults=self.recommended,
            meter=SimpleNamespace(snapshot=lambda: None),
            plan=SimpleNamespace(max_model_len=self.context),
            live=SimpleNamespace(prompt_tokens=self.look),
            tokenizer=SimpleNamespace(chat_template=self.template),
        )

    def look(self):
        """The prompt of 5,000 tokens is read when it was looked at twice."""
        self.num_looks += 1
        if self.num_looks == 2:
            self.is_read.set()
        return 1000 * self.num_looks, 5000

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate_stream(self, prompt, params):
        FakeLLM.asked = prompt, params
        if self.is_long:
            self.is_read.wait()
        metrics = RequestMetrics(
            arrival_time=0.0, time_to_first_token=0.5, time_per_output_token=0.1, num_prompt_tokens=3,
            num_generated_tokens=2,
        )  # fmt: skip
        for text, last in zip(self.said, (None, metrics), strict=True):
            yield StreamOutput(
                request_id="0", index=0, text_delta=text, token_ids_delta=[1], finished=last is not None, metrics=last,
                finish_reason=None if last is None else self.reason,
            )  # fmt: skip
            self.is_watched[text] = any(thread.name == "nanoinfer-progress" for thread in threading.enumerate())


class Stdin(io.StringIO):
    def __init__(self, text, is_terminal):
        super().__init__(text)
        self.isatty = lambda: is_terminal


@pytest.fixture
def asked(monkeypatch):
    """Returns what the engine is asked for by a command line, with this on stdin; None on stdin: a terminal."""

    def ask(*words, piped=None, recommended=None):
        fake = type("Fake", (FakeLLM,), {"recommended": recommended or {}})
        monkeypatch.setattr(nanoinfer, "LLM", fake, raising=False)
        monkeypatch.setattr("nanoinfer.engine.stats.bound_line", lambda *_: "bound by gpu_memory_limit")
        monkeypatch.setattr("sys.stdin", Stdin(piped or "", piped is None))
        status = main(["generate", "recall", *words])
        return FakeLLM.asked if status == 0 else status

    return ask


@pytest.mark.parametrize(
    "words, piped, prompt",
    [
        (["some text"], None, "some text"),
        (["-p", "some text"], None, "some text"),
        (["--prompt=some text"], None, "some text"),
        (["-n", "5", "some text"], None, "some text"),  # options may stand before it
        (["-"], "some text\n", "some text"),
        (["-p", "-"], "some text\n\n", "some text\n"),
        ([], "some text", "some text"),
        (["some text"], "what is piped", "some text"),
    ],
)
def test_the_prompt_is_a_word_an_option_or_what_is_piped(asked, words, piped, prompt):
    assert asked(*words, piped=piped)[0] == prompt


@pytest.mark.parametrize(
    "words, piped, message",
    [
        ([], None, 'no prompt is given: nanoinfer generate MODEL "text", or pipe it'),
        ([], "", "nothing came from stdin: give a prompt"),
        (["a", "-p", "b"], None, "the prompt is given twice"),
        (["a", "--top-p", "2"], None, "--top-p is 2.0, it must be a number in"),
        (["a", "--top-k", "4", "--min-p", "0.1"], None, "--top-k and --min-p would have no effect: without --temp"),
    ],
)
def test_what_cannot_be_generated_is_refused(asked, capsys, words, piped, message):
    assert asked(*words, piped=piped) == 2
    assert message in capsys.readouterr().err


def test_two_prompts_are_no_prompt(asked, capsys):
    with pytest.raises(SystemExit):
        asked("a", "b")
    assert "unknown arguments: b" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--logit-bias", "[5]"], "'[5]' must be an object in JSON, such as '{\"50256\": -100}'"),
        (["--logit-bias", '{"x": 5}'], "--logit-bias is {'x': 5}, it must be a dict of token ids"),
        (["--allowed-token-ids", "5;6"], "'5;6' must be token ids, such as 16,17,18"),
        (["--bad-words", ""], "--bad-words is [''], it must be a list of strings, none of them blank"),
    ],
)
def test_limits_that_cannot_be_are_refused(asked, capsys, words, message):
    with suppress(SystemExit):
        assert asked("text", *words) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, recommended, params",
    [
        ([], {}, dict(temperature=0, max_tokens=128)),
        (["-n", "2k"], {}, dict(temperature=0, max_tokens=2048)),
        (["--temperature", "0.7", "--top-p", "0.9", "--top-k", "20", "--min-p", "0.1", "--seed", "5"], {},
         dict(temperature=0.7, top_p=0.9, top_k=20, min_p=0.1, seed=5, max_tokens=128)),
        ([], dict(temperature=0.6, top_p=0.95), dict(temperature=0.6, top_p=0.95, max_tokens=128)),
        (["--top-p", "0.5"], dict(temperature=0.6, top_p=0.95), dict(temperature=0.6, top_p=0.5, max_tokens=128)),
        (["--bad-words", "two", "--bad-words", "three", "--logit-bias", '{"5": 1}', "--allowed-token-ids", "5,6"], {},
         dict(temperature=0, bad_words=["two", "three"], logit_bias={5: 1}, allowed_token_ids=[5, 6], max_tokens=128)),
        (["--temperature", "0", "--top-p", "0.5"], dict(temperature=0.6),
         dict(temperature=0, top_p=0.5, max_tokens=128)),
    ],
)  # fmt: skip
def test_what_is_left_out_is_as_the_checkpoint_recommends(asked, words, recommended, params):
    assert asked("text", *words, recommended=recommended)[1] == SamplingParams(**params)


def test_the_engine_reports_in_the_words_of_the_command(asked, monkeypatch, capsys):
    begin = FakeLLM.__init__

    def reporting(self, *words, **arguments):
        begin(self, *words, **arguments)
        self._report("contexts of 5 tokens (max_model_len)")

    monkeypatch.setattr(FakeLLM, "__init__", reporting)
    asked("text")
    assert capsys.readouterr().err.startswith("nanoinfer generate: contexts of 5 tokens (--max-model-len)\n")


def test_text_is_on_stdout_and_the_speed_on_stderr(asked, capsys):
    asked("text")
    assert capsys.readouterr() == (
        "two words\n",
        "nanoinfer generate: 3 prompt tokens, first token after 0.50 s, 2 tokens at 10.0 tokens/s; "
        "bound by --gpu-memory-limit\n",
    )


@pytest.mark.parametrize(
    "words, context, said",
    [
        (["-n", "2"], 2048, "stopped at 2 tokens: -n gives more. "),
        (["-n", "2"], 5, "stopped, the context of 5 tokens is full: --max-model-len gives more. "),
        ([], 5, "stopped, the context of 5 tokens is full: --max-model-len gives more. "),
    ],
)
def test_an_answer_that_was_cut_is_called_cut(asked, capsys, monkeypatch, words, context, said):
    monkeypatch.setattr(FakeLLM, "context", context)
    asked("text", *words)
    assert "stopped" not in capsys.readouterr().err
    monkeypatch.setattr(FakeLLM, "reason", "length")
    asked("text", *words)
    assert capsys.readouterr().err.startswith(f"nanoinfer generate: {said}3 prompt tokens")
    monkeypatch.setattr(FakeLLM, "template", "{{ messages }}")
    asked("text", *words)
    asks = "The text was continued as it stands: --chat asks the model. "
    assert capsys.readouterr().err.startswith(f"nanoinfer generate: {said}{asks}3 prompt tokens")


def test_the_answer_is_one_object_in_json_where_that_is_asked_for(asked, capsys):
    asked("text", "--json")
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["finish_reason"], found["metrics"]["num_generated_tokens"]) == ("two words", "stop", 2)


def test_what_ends_the_answer_may_be_given(asked):
    assert asked("text", "--stop", "a", "--stop", "b")[1].stop == ("a", "b")
    assert asked("text", recommended={"stop": ["x"]})[1].stop == ("x",)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_model_gives_a_terminal_no_orders(asked, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(FakeLLM, "said", ("\x1b[31mred\tone\n", "\x9b2J漢"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    asked("text")
    assert capsys.readouterr().out == ("[31mred\tone\n2J漢\n" if is_terminal else "\x1b[31mred\tone\n\x9b2J漢\n")


def test_a_terminal_shows_how_far_a_long_prompt_is_read(asked, capsys, monkeypatch):
    monkeypatch.setattr(generate, "PromptProgress", partial(PromptProgress, after=0))
    monkeypatch.setattr(FakeLLM, "is_long", True)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    asked("text")
    text, said = capsys.readouterr()
    lines = "\rreading the prompt: 1,000 of 5,000 tokens\x1b[K\rreading the prompt: 2,000 of 5,000 tokens\x1b[K"
    assert not FakeLLM.is_watched["two"], "the line might come back in the midst of the answer"
    loading, said = said.split("\n", 1)
    assert loading.startswith("nanoinfer generate: loading recall, ")
    assert text == "two words\n" and said.startswith(f"{lines}\r\x1b[Knanoinfer generate: 3 prompt tokens")


def test_a_chat_answers_a_message_in_the_template_of_the_model(capsys):
    question = "What is the pass key of Mira Holt?"
    words = ["generate", "recall", question, "--device", "cpu"]
    assert main([*words, "--system", SPOKEN, "-n", "14"]) == 0
    answer, said = capsys.readouterr()
    assert answer.startswith(" The pass key of Mira Holt is 48192.")
    assert re.search(r"32 prompt tokens, first token after .* s, 14 tokens at .* tokens/s; bound by CPU: ", said)
    assert main([*words, "--chat", "-n", "1"]) == 0
    assert "16 prompt tokens, first token after" in capsys.readouterr().err
    assert main([*words, "-n", "1"]) == 0
    assert "11 prompt tokens, first token after" in capsys.readouterr().err


def test_a_chat_without_a_limit_goes_on_until_the_model_ends(asked, monkeypatch):
    monkeypatch.setattr("nanoinfer.commands.generate._in_template", lambda llm, text, system: [len(text)])
    assert asked("text", "--chat") == ([4], SamplingParams(temperature=0, max_tokens=None))
