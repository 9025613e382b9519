"""Large answers, and long texts whose tokens are asked for: small requests do not wait for them."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from scripted import ROOM, make_speaking_checkpoint
from serving import events, serving
from trained_tokenizers import make_tokenizer

from nanoinfer.outputs import Logprob, RequestMetrics, StreamOutput
from nanoinfer.requests.text_offsets import text_offsets
from nanoinfer.serve import token_answers
from nanoinfer.serve.answers import LOOP_WORK, ChatAnswer, CompletionAnswer
from nanoinfer.serve.client import whole_answer
from nanoinfer.serve.json_pieces import encode, in_turns, json_pieces
from nanoinfer.serve.protocol import ChatRequest, CompletionRequest
from nanoinfer.serve.shown_logprobs import ShownLogprobs
from nanoinfer.serve.tokenizing import Echo, PromptTokenizer

USER = {"role": "user", "content": "Hi"}
CHAT = "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOP = 20
LARGE = dict(messages=[USER], n=8, max_tokens=100, logprobs=True, top_logprobs=TOP, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_speaking_checkpoint(tmp_path_factory.mktemp("speaking"), TEMPLATE)


# By structure: between two turns little is done, however large the answer


class Bytes(dict):
    """The bytes of every token, and how often they were asked for: once for each log-probability that is shown."""

    num_asked = 0

    def __getitem__(self, token_id):
        self.num_asked += 1
        return b"\xff%d" % token_id


def entries(count, first=100):
    """Log-probabilities of tokens whose texts are no characters."""
    entry = {first + at: Logprob(logprob=-1.0, rank=at + 1, decoded_token="\ufffd") for at in range(TOP)}
    return [entry] * count


def outputs(n, num_tokens, num_prompt):
    """Whole completions of a prompt that has its log-probabilities, if `num_prompt`."""
    prompt = [None, *entries(num_prompt - 1)] if num_prompt else None
    return [
        (0, StreamOutput(
            request_id="r", index=index, text_delta="x", token_ids_delta=[100] * num_tokens,
            logprobs_delta=entries(num_tokens), text_offsets_delta=[0] * num_tokens, finished=True,
            prompt_logprobs=None if index else prompt, finish_reason="length",
            metrics=RequestMetrics(arrival_time=0.0),
        ))
        for index in range(n)
    ]  # fmt: skip


def answer_of(kind, n, num_prompt):
    found = Bytes()
    if kind is ChatAnswer:
        asked = ChatRequest(messages=[USER], logprobs=True, top_logprobs=TOP, n=n)
        answer = ChatAnswer(asked, "m", [(None, [5])], True, None, found)
        silent = SimpleNamespace(push=lambda text, ids: [], finish=list)
        answer.parsers = [silent] * n
        return answer, found
    asked = CompletionRequest(prompt=[100], logprobs=TOP, n=n, echo=bool(num_prompt))
    echoed = [Echo("p", "p", [0] * num_prompt)] if num_prompt else None
    return CompletionAnswer(asked, "m", [(None, [100] * (num_prompt or 1))], True, echoed, found), found


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("kind", "num_prompt"), [(ChatAnswer, 0), (CompletionAnswer, 0), (CompletionAnswer, 300)]
)  # fmt: skip
def test_little_is_done_between_two_turns(kind, num_prompt, is_streamed):
    most = []
    for n, num_tokens in ((1, 800), (6, 400)):
        answer, asked = answer_of(kind, n, num_prompt)
        given, steps, written = outputs(n, num_tokens, num_prompt), [0], b""
        assert answer.work(given) > LOOP_WORK
        for part in answer.events_in_turns(given) if is_streamed else answer.whole(given):
            written += part
            steps.append(asked.num_asked)
        assert steps[-1] >= n * (num_tokens + max(0, num_prompt - 1)) * TOP
        most.append(max(after - before for before, after in zip(steps, steps[1:])))
        told = events(written.decode() + "data: [DONE]\n\n") if is_streamed else [json.loads(written)]
        choices = [choice for one in told for choice in one["choices"]]
        assert [choice["index"] for choice in choices] == list(range(n))
        for choice in choices:
            of_tokens = choice["logprobs"]["content" if kind is ChatAnswer else "top_logprobs"]
            assert len(of_tokens) == num_prompt + num_tokens
    assert max(most) <= 4 * LOOP_WORK < 400 * TOP, most


def test_few_small_outputs_are_no_work_for_another_thread():
    for n, num_tokens, is_large in ((1, 1, False), (4, 10, False), (1, 1000, True), (128, 1, True)):
        answer, _ = answer_of(CompletionAnswer, n, 0)
        assert (answer.work(outputs(n, num_tokens, 0)) > LOOP_WORK) == is_large
    answer, _ = answer_of(ChatAnswer, 1, 0)
    plain = StreamOutput(request_id="r", index=0, text_delta="x" * 900, token_ids_delta=[100] * 900)
    assert answer.work([(0, plain)]) <= LOOP_WORK < answer.work([(0, plain)] * 2)


def test_small_outputs_that_come_together_are_written_a_few_at_a_time():
    given = outputs(128, 1, 0)
    parts = list(answer_of(CompletionAnswer, 128, 0)[0].events_in_turns(given))
    at_once = answer_of(CompletionAnswer, 128, 0)[0].events(given)
    told, wanted = (events(one.decode() + "data: [DONE]\n\n") for one in (b"".join(parts), at_once))
    assert 3 < len(parts) < 20 and [one["choices"] for one in told] == [one["choices"] for one in wanted]


def test_json_in_pieces_is_json():
    value = {"list": [{5: [1, None, "ä\n", 2.5]}, {}, []] * 200, "short": [[], {}, {"a": True}], "n": None, "e": {}}
    value |= {"numbers": list(range(10_000))}
    wanted = json.dumps(value, separators=(",", ":"))
    assert "".join(json_pieces(value)) == wanted
    made = {"many": iter([{"a": [one]} for one in range(100)]), "none": iter([])}
    wanted = json.dumps({"many": [{"a": [one]} for one in range(100)], "none": []}, separators=(",", ":"))
    assert "".join(json_pieces(made)) == wanted and len(list(json_pieces({"many": iter(range(100))}))) > 4
    assert encode({"many": iter(range(3))}) == '{"many":[0,1,2]}'
    assert list(in_turns(["a" * 70_000, "b", "c" * 70_000])) == [b"", b"", b"a" * 70_000 + b"b" + b"c" * 70_000]


def test_large_answers_take_turns():
    order = []

    def answer(name):
        def whole(_):
            for place in range(3):
                order.append((name, place, threading.current_thread().name.removesuffix("_0")))
                yield name
            yield b""

        return SimpleNamespace(work=lambda _: LOOP_WORK + 1, whole=whole)

    class Stream:
        async def next(self):
            return []

        def close(self):
            pass

    async def ask():
        prompts = PromptTokenizer(make_tokenizer("qwen"), None, 100)
        try:
            made = (whole_answer(Stream(), answer(name), asyncio.Event().wait, prompts.write) for name in (b"a", b"b"))
            return await asyncio.gather(*made)
        finally:
            prompts.close()

    assert [response.body for response in asyncio.run(ask())] == [b"aaa", b"bbb"]
    thread = "nanoinfer-tokenizer-answers"
    assert order == [(name, place, thread) for place in range(3) for name in (b"a", b"b")]


# Over HTTP


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_small_answer_goes_past_a_large_one(path, monkeypatch, is_streamed):
    may_go_on, begun, of_chat = threading.Event(), [], ShownLogprobs.of_chat

    def slow(self, token_ids, entries, top):
        if top == TOP:
            begun.append(threading.current_thread().name.removesuffix("_0"))
            assert may_go_on.wait(30), "the small answers did not come"
        return of_chat(self, token_ids, entries, top)

    monkeypatch.setattr(ShownLogprobs, "of_chat", slow)
    # Streamed, few tokens come at once: so many completions that they are work.
    large = LARGE | (dict(n=60, max_tokens=2, stream=True) if is_streamed else {})

    async def ask():
        async with serving(path, **ROOM | dict(max_num_seqs=64)) as served:
            one = asyncio.create_task(served.post(CHAT, **large))
            await served.wait_until(lambda _: begun, seconds=60)
            small = dict(messages=[USER], max_tokens=2, logprobs=True, top_logprobs=1, ignore_eos=True)
            for asked in (small, small | dict(stream=True), dict(messages=[USER], max_tokens=2)):
                assert (await served.post(CHAT, **asked)).status_code == 200
            assert (await served.post("/tokenize", prompt="Hi")).status_code == 200
            assert (await served.client.get("/health")).status_code == 200
            assert not one.done()
            may_go_on.set()
            response = await one
            assert response.status_code == 200
            await served.wait_until_idle()
            return response

    response = asyncio.run(ask())
    assert set(begun) == {"nanoinfer-tokenizer-answers"}
    told = events(response.text) if is_streamed else [response.json()]
    found = dict.fromkeys(range(large["n"]), 0)
    for choice in (choice for one in told for choice in one["choices"] if choice["logprobs"]):
        found[choice["index"]] += len(choice["logprobs"]["content"])
    assert found == dict.fromkeys(range(large["n"]), large["max_tokens"])


def test_a_long_conversation_is_not_parsed_on_the_loop(path, monkeypatch):
    threads, whole = [], ChatAnswer.read

    def read(self, output):
        threads.append((len(output.token_ids_delta), threading.current_thread().name.removesuffix("_0")))
        return whole(self, output)

    monkeypatch.setattr(ChatAnswer, "read", read)

    async def ask():
        async with serving(path, **ROOM) as served:
            asked = dict(messages=[USER], temperature=0, ignore_eos=True)
            for how in (dict(max_tokens=20), dict(max_tokens=300, n=4)):
                assert (await served.post(CHAT, **asked, **how)).status_code == 200

    asyncio.run(ask())
    (first, *rest) = threads
    assert first == (20, threading.main_thread().name)
    assert rest == [(300, "nanoinfer-tokenizer-answers")] * 4


@pytest.mark.parametrize("size", ["long", "huge"])
def test_tokens_of_a_short_text_are_told_past_longer_ones(path, size, monkeypatch):
    text, encode = "word " * (50_000 if size == "huge" else 5_000), token_answers.encode
    may_go_on, begun = threading.Event(), []

    def slow(tokenizer, given, **how):
        if len(given) > 1000:
            begun.append(1)
            assert may_go_on.wait(30), "the short ones waited"
        return encode(tokenizer, given, **how)

    monkeypatch.setattr(token_answers, "encode", slow)

    async def ask():
        async with serving(path, **ROOM) as served:
            decode = served.async_engine.prompts.tokenizer.decode
            waiting = [asyncio.create_task(served.post("/tokenize", prompt=text)) for _ in range(3)]
            waiting += [
                asyncio.create_task(served.post("/v1/messages/count_tokens", messages=[USER | dict(content=text)]))
            ]
            await served.wait_until(lambda _: begun)
            short = await served.post("/tokenize", prompt="Hi")
            counted = await served.post("/v1/messages/count_tokens", messages=[USER])
            ids = short.json()["tokens"]
            assert (await served.post("/detokenize", tokens=ids)).json() == {"prompt": decode(ids)}
            assert counted.json()["input_tokens"] == len(ids)
            assert not any(one.done() for one in waiting)
            may_go_on.set()
            return [(await one).status_code for one in waiting]

    assert asyncio.run(ask()) == [200] * 4


def test_where_the_tokens_of_an_echoed_prompt_stand_is_found_in_turns():
    async def ask():
        prompts, text = PromptTokenizer(make_tokenizer("qwen"), SimpleNamespace(tokenize=list), 10**6), "It's é. " * 500
        turns, write = [], prompts.write

        async def recorded(work):
            turns.append(await write(work))
            return turns[-1]

        prompts.write = recorded
        try:
            prompt = await prompts.tokenize(text)
            without, echo = [await prompts.echo_of(prompt, has_logprobs=has) for has in (False, True)]
        finally:
            prompts.close()
        assert without == Echo(text) and echo.text == text and echo.first == prompts.tokenizer.decode(prompt[1][:1])
        assert echo.offsets == sum(turns, []) == list(text_offsets(prompts.tokenizer, text, prompt[1]))
        assert len(turns) > 3 and max(map(len, turns)) <= 512

    asyncio.run(ask())
