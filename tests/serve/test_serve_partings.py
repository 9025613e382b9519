"""Where a prompt parted from a recent one: which partings are told, what is kept for it, the log and the metrics."""

import asyncio
import io
import json
import random
import threading
import time

import pytest
from serving import make_served_checkpoint, metrics_of, serving

from nanoinfer.serve.ended import EndedRequest
from nanoinfer.serve.log import logging_to
from nanoinfer.serve.partings import EXCERPT_TOKENS, RecentPrompts, num_shared
from nanoinfer.serve.request_log import RequestLog

BLOCK = 16


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


def tokens(count, seed):
    generator = random.Random(seed)
    return [generator.randrange(3, 160) for _ in range(count)]


SYSTEM, BODY, QUESTION, OUTPUT = (tokens(count, seed) for seed, count in enumerate((40, 400, 20, 30)))


def taken(*requests, **limits):
    """What is said of the last of these requests, each a prompt and its output; the cache is as good as it can be."""
    recent, found = RecentPrompts(BLOCK, **limits), None
    for prompt, output in requests:
        shared = max((num_shared(one.tokens, prompt) for one in recent.recent), default=0)
        found = recent.take(prompt + output, len(prompt), min(shared, len(prompt) - 1) // BLOCK * BLOCK)
    return found


def test_a_header_that_changes_parts_what_is_the_same_again():
    for at in (0, 5, 39):
        first, second = (SYSTEM[:at] + [changed] + BODY for changed in (1, 2))
        parting = taken((first, OUTPUT), (second, QUESTION))
        assert parting.at == at and parting.behind == SYSTEM[:at]
        assert parting.num_again == len(BODY)
        assert parting.here == [2] + BODY[: EXCERPT_TOKENS - 1] and parting.there == [1] + BODY[: EXCERPT_TOKENS - 1]


def test_a_template_that_drops_thinking_parts_from_the_turn_before():
    turn, thinking = SYSTEM + QUESTION, tokens(70, 9)
    parting = taken((turn, thinking + BODY), (turn + BODY + tokens(30, 10), OUTPUT))
    assert parting.at == 60 and parting.num_again == len(BODY)
    assert parting.here == BODY[:EXCERPT_TOKENS] and parting.there == thinking[:EXCERPT_TOKENS]


@pytest.mark.parametrize(
    "prompt",
    {
        "another question about one document": SYSTEM + BODY + tokens(200, 5),
        "the next turn": SYSTEM + BODY + QUESTION + OUTPUT + tokens(50, 6),
        "the same": SYSTEM + BODY + QUESTION,
        "a part of it": SYSTEM + BODY[:50],
        "nothing in common": tokens(300, 7),
        "less than a block": SYSTEM + [1, *BODY[:15]],
    }.values(),
)
def test_what_lost_nothing_is_not_told(prompt):
    assert taken((SYSTEM + BODY + QUESTION, OUTPUT), (prompt, OUTPUT)) is None


def test_a_cache_that_had_more_or_less_than_the_text_let_it_is_another_matter():
    for num_found, is_told in ((32, True), (0, False), (16, False), (48, False)):
        recent = RecentPrompts(BLOCK)
        recent.take(SYSTEM + BODY, 440, 0)
        assert (recent.take(SYSTEM + [1] + BODY, 441, num_found) is not None) == is_told


def test_of_many_that_part_there_the_one_that_is_the_same_again_is_shown():
    # One shares a token more, by chance, and one went on behind the beginning of this prompt.
    others = [(SYSTEM + [2, *tokens(300, seed)], OUTPUT) for seed in (20, 21)]
    near = (SYSTEM + [1, 7, *tokens(300, 22)], OUTPUT)
    own = (SYSTEM + [3] + BODY, OUTPUT)
    for order in ([own, *others, near], [near, *others, own]):
        parting = taken(*order, (SYSTEM + [1, 7] + BODY, OUTPUT))
        assert parting.at == 40 and parting.there[:2] == [3, BODY[0]]
    assert taken(*others, near, (SYSTEM + [1, 7] + BODY, OUTPUT)) is None


def test_equal_runs_of_79_tokens_are_always_found():
    """The marks are a few of all windows, and yet no such run has none."""
    for seed in range(100, 200):
        run = tokens(79, seed)
        first, second = (tokens(count, seed + count) + run + tokens(9, seed + 2) for count in (150, 201))
        assert taken((SYSTEM + first, OUTPUT), (SYSTEM + second + tokens(99, 1), OUTPUT)).num_again >= 79


def test_a_parting_before_what_the_cache_had_is_not_told():
    earlier, later = (SYSTEM[:5] + [1] + BODY, OUTPUT), (SYSTEM + [2] + tokens(99, 3), OUTPUT)
    assert taken(earlier, (SYSTEM + [3] + BODY, OUTPUT)).at == 5
    assert taken(earlier, later, (SYSTEM + [3] + BODY, OUTPUT)) is None


def test_what_goes_on_where_a_recent_one_ended_has_not_parted():
    ended, other = (SYSTEM, []), (SYSTEM[:35] + [1] + BODY, OUTPUT)
    assert taken(other, (SYSTEM + BODY, OUTPUT)).at == 35
    assert taken(other, ended, (SYSTEM + BODY, OUTPUT)) is None


@pytest.mark.parametrize("block, is_told", [(16, True), (64, False)])
def test_what_cost_less_than_a_block_is_not_told(block, is_told):
    recent = RecentPrompts(block)
    recent.take(SYSTEM + [1] + BODY[:60], 101, 0)
    assert (recent.take(SYSTEM + [2] + BODY[:60], 101, 40 // block * block) is not None) == is_told


def test_an_answer_that_comes_again_chooses_nobody():
    own, other = (SYSTEM + [1] + BODY[:100], OUTPUT), (SYSTEM + [2] + tokens(90, 3), BODY[100:])
    assert taken(own, other, (SYSTEM + [3] + BODY[:100], BODY[100:])).there[0] == 1


def test_what_is_kept_is_bounded_and_a_turn_takes_the_place_of_the_one_before():
    def kept():
        return [(len(one.tokens), one.tokens[:300].tolist()) for one in recent.recent]

    recent = RecentPrompts(BLOCK, max_recent=3, max_tokens=1250)
    texts = [tokens(300, 30 + seed) for seed in range(6)]
    for text in texts[:5]:
        recent.take(text, 200, 0)
    assert kept() == [(300, text) for text in texts[2:5]]
    recent.take(texts[4] + tokens(100, 1), 310, 0)
    assert kept() == [(300, texts[2]), (300, texts[3]), (400, texts[4])]
    recent.take(texts[5] + tokens(400, 1), 700, 0)
    assert kept() == [(400, texts[4]), (700, texts[5])]
    recent.take(tokens(1251, 41), 500, 0)
    assert not recent.recent
    assert recent.take([1], 1, 0) is None and recent.take([1] * 20, 20, 0) is None, "shorter than a window"


def ask_twice(path, level, at=40, **arguments):
    """The lines of a server that got a prompt, and the same with one more token after some, and the metrics."""
    stream, first, second = io.StringIO(), SYSTEM[:at] + BODY[:200], SYSTEM[:at] + [1] + BODY[:200]

    async def ask():
        async with serving(path, **arguments) as served:
            await served.complete(first, max_tokens=1)
            await served.complete(second, max_tokens=3)
            served.async_engine.log.close()
            return await metrics_of(served)

    with logging_to(level, "json", stream):
        metrics = asyncio.run(ask())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if line.get("event") == "request"], metrics


def test_the_log_and_the_metrics_say_where_a_prompt_parted(path):
    (first, second), metrics = ask_twice(path, "info")
    assert "parted_at" not in first and second["cached_tokens"] == 32
    assert second["parted_at"] == 40 and second["parted_again"] == 200
    assert metrics["nanoinfer:prefix_parted_last"] == 40
    assert (
        metrics["nanoinfer:prefix_parted_at_tokens_count"] == 1
        and metrics["nanoinfer:prefix_parted_at_tokens_sum"] == 40
    )
    assert metrics["nanoinfer:prefix_parted_again_total"] == second["parted_again"]
    assert not {"parted_here", "parted_before"} & second.keys() and f"w{BODY[0]}" not in json.dumps(second)


def test_at_debug_the_text_on_both_sides_is_shown(path):
    (_, second), _ = ask_twice(path, "debug")
    before, here, there = (" ".join(f"w{token}" for token in ids) for ids in (SYSTEM, [1] + BODY, BODY))
    assert (second["parted_before"], second["parted_here"], second["parted_there"]) == (
        before[-40:], here[:40], there[:40]
    )  # fmt: skip


@pytest.mark.parametrize("is_cached", [True, False])
def test_without_prefix_caching_nothing_is_kept(path, is_cached):
    (_, second), metrics = ask_twice(path, "debug", at=5, enable_prefix_caching=is_cached)
    assert ("parted_at" in second) == is_cached == metrics["nanoinfer:prefix_parted_at_tokens_count"]


def test_a_tokenizer_that_fails_costs_the_text_and_not_the_line(path, monkeypatch):
    def fail(self, token_ids):
        raise ValueError("w20 w21")

    monkeypatch.setattr("nanoinfer.serve.tokenizing.PromptTokenizer.shown", fail)
    (_, second), metrics = ask_twice(path, "debug")
    assert second["parted_at"] == 40 and "parted_here" not in second


def test_the_step_does_not_look(path, monkeypatch):
    """The comparison runs on a thread that neither the engine nor the event loop waits for."""
    threads = []
    take = RecentPrompts.take
    monkeypatch.setattr(
        RecentPrompts, "take", lambda *given: (threads.append(threading.current_thread().name), take(*given))[1]
    )
    ask_twice(path, "info")
    assert len(threads) == 2 and all(name.startswith("nanoinfer-request-log") for name in threads)


def test_the_end_of_the_server_waits_for_the_last_lines(path, monkeypatch):
    take, stream, logs = RecentPrompts.take, io.StringIO(), []
    monkeypatch.setattr(RecentPrompts, "take", lambda *given: (time.sleep(0.05), take(*given))[1])

    async def ask():
        async with serving(path) as served:
            logs.append(served.async_engine.log)
            await served.complete(SYSTEM, max_tokens=1)

    with logging_to("info", "text", stream):
        asyncio.run(ask())
        assert stream.getvalue().count("40 tokens in") == 1
        logs[0].take(ended_with(first_token=0.1))  # behind the end it is written at once
        assert stream.getvalue().count("\n") == 2


def test_what_was_never_computed_is_not_remembered():
    recent = RecentPrompts(BLOCK)
    log = RequestLog(recent, str, BLOCK)
    log.take(ended_with(first_token=None))
    log.close()
    assert not recent.recent


def ended_with(first_token):
    return EndedRequest(
        name="x", reasons=["abort"], num_prompt_tokens=40, num_cached_tokens=0, num_generated_tokens=0, total=1.0,
        per_token=None, bound="queue", failure=None, token_ids=SYSTEM, num_found=0, first_token=first_token,
        streamed_bytes=0,
    )  # fmt: skip
