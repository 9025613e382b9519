"""Log-probabilities of prompts over HTTP: `echo` with `logprobs`, as lm-evaluation-harness asks, and vLLM's field."""

import asyncio
import json

import pytest
from engines import COMMON, random_prompts
from serving import events, make_served_checkpoint, serving

from nanoinfer import LLM, SamplingParams
from nanoinfer.outputs import Logprob, StreamOutput
from nanoinfer.serve.answers import CompletionAnswer
from nanoinfer.serve.protocol import CompletionRequest
from nanoinfer.serve.tokenizing import Echo

GREEDY = dict(temperature=0, ignore_eos=True)
IDS = random_prompts(3, 20, 70, seed=8)
CHAT = "/v1/chat/completions"
LISTS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_served_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, **(COMMON | dict(skip_tokenizer_init=False))) as llm:
        yield llm


def post_all(path, *bodies, **arguments):
    """The answers to requests, one after the other: bodies, or texts of streams."""

    async def ask():
        async with serving(path, **arguments) as served:
            answers = [await served.post(**GREEDY | body) for body in bodies]
            assert all(answer.status_code == 200 for answer in answers), [answer.text for answer in answers]
            await served.wait_until_idle()
            return [answer.text if body.get("stream") else answer.json() for answer, body in zip(answers, bodies)]

    return asyncio.run(ask())


def shown(entry):
    return {one.decoded_token: one.logprob for one in entry.values()}


def test_echo_with_logprobs_is_what_lm_eval_reads(path, llm):
    """It sends token ids of questions with one answer each, and sums over what stands behind the question."""
    params = SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1, **GREEDY)
    wanted = llm.generate(IDS, params, use_tqdm=False)
    (answer,) = post_all(path, dict(prompt=IDS, max_tokens=1, logprobs=1, echo=True, seed=1234))
    for choice, output, ids in zip(answer["choices"], wanted, IDS, strict=True):
        entries = [*output.prompt_logprobs, *output.outputs[0].logprobs]
        tokens = ids + output.outputs[0].token_ids
        found = choice["logprobs"]
        assert choice["text"] == " ".join(f"w{token}" for token in ids) + output.outputs[0].text
        assert found["tokens"] == [f"w{token}" for token in tokens]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:] == [one[token].logprob for token, one in zip(tokens[1:], entries[1:])]
        assert found["top_logprobs"][1:] == [shown(entry) for entry in entries[1:]]
        ends = [*found["text_offset"][1:], len(choice["text"])]
        pieces = [choice["text"][begin:end] for begin, end in zip(found["text_offset"], ends, strict=True)]
        assert pieces == [" " * (place > 0) + token for place, token in enumerate(found["tokens"])]
        assert sum(found["token_logprobs"][7:-1]) < 0 and "prompt_logprobs" not in choice
    assert answer["usage"]["completion_tokens"] == 3


def test_no_tokens_are_the_prompt_alone(path):
    common = dict(prompt=["w20 w21 w22", "w33"], echo=True, logprobs=2)
    whole, one, streamed, without = post_all(
        path,
        dict(**common, max_tokens=0, return_token_ids=True),
        dict(**common, max_tokens=1),
        dict(**common, max_tokens=0, stream=True, stream_options={"include_usage": True}),
        dict(prompt="w20 w21", echo=True, max_tokens=0),
    )
    assert [choice["text"] for choice in whole["choices"]] == common["prompt"]
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["total_tokens"] == 4
    for choice, longer in zip(whole["choices"], one["choices"], strict=True):
        assert choice["finish_reason"] == "length" and choice["stop_reason"] is None and choice["token_ids"] == []
        assert choice["logprobs"] == {name: longer["logprobs"][name][:-1] for name in LISTS}
    *parts, last = events(streamed)
    assert last["usage"] == whole["usage"]
    for part in parts:
        (choice,) = part["choices"]
        wanted = whole["choices"][choice["index"]]
        assert {name: choice[name] for name in ("text", "logprobs", "finish_reason")} == {
            name: wanted[name] for name in ("text", "logprobs", "finish_reason")
        }
    (choice,) = without["choices"]
    assert choice["text"] == "w20 w21" and choice["logprobs"] is None


def test_a_stream_with_echo_joins_to_the_whole_answer(path):
    asked = dict(prompt=IDS[:2], echo=True, logprobs=1, n=2, max_tokens=4, temperature=1.0, seed=2)
    whole, streamed = post_all(path, asked, asked | dict(stream=True))
    parts = [part["choices"][0] for part in events(streamed)]
    for choice in whole["choices"]:
        mine = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        for name in LISTS:
            assert sum((part["logprobs"][name] for part in mine), []) == choice["logprobs"][name]
    first, second = (choice["logprobs"] for choice in whole["choices"][:2])
    assert first["token_logprobs"][: len(IDS[0])] == second["token_logprobs"][: len(IDS[0])]


def test_a_completion_that_is_ahead_of_its_prompts_first_one_waits_for_it():
    """Its blocks were in the cache, where the first one looks for none."""
    entries = {"prompt": [None, {6: Logprob(logprob=-1.0, rank=1, decoded_token="b")}]}
    asked = CompletionRequest(prompt=[5, 6], echo=True, logprobs=0, n=2)
    answer = CompletionAnswer(asked, "m", [(None, [5, 6])], True, [Echo("ab", "a", [0, 1])])

    def output(index, token, prompt=None):
        delta = [{token: Logprob(logprob=-2.0, rank=1, decoded_token="c")}]
        return StreamOutput(
            request_id="r", index=index, text_delta="c", token_ids_delta=[token], logprobs_delta=delta,
            text_offsets_delta=[{7: 0, 8: 1, 9: 0, 10: 2}[token]], prompt_logprobs=prompt,
        )  # fmt: skip

    assert answer.events([(0, output(1, 7)), (0, output(1, 8))]) == b""
    first = (0, output(0, 9, entries["prompt"]))
    assert answer.work([first]) > 2 * answer.work([(0, output(0, 9))]), "the ones that it releases are work, too"
    sent = answer.events([first]) + answer.events([(0, output(1, 10))])
    choices = [json.loads(line[6:])["choices"][0] for line in sent.decode().split("\n\n") if line]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "abc"), (1, "abc"), (1, "c"), (1, "c")]
    assert [choice["logprobs"]["tokens"] for choice in choices[:3]] == [["a", "b", "c"], ["a", "b", "c"], ["c"]]
    assert [choice["logprobs"]["text_offset"] for choice in choices] == [[0, 1, 2], [0, 1, 2], [3], [4]]


def test_prompt_logprobs_are_those_of_vllm(path, llm):
    params = SamplingParams(max_tokens=2, n=2, prompt_logprobs=3, seed=1, temperature=1.0, ignore_eos=True)
    (wanted,) = llm.generate(IDS[0], params, use_tqdm=False)
    messages = [{"role": "user", "content": "w21 w22"}]
    (talked,) = llm.chat(messages, SamplingParams(max_tokens=2, prompt_logprobs=1, **GREEDY), use_tqdm=False)
    sampled = dict(max_tokens=2, seed=1, temperature=1.0)
    completed, chatted, both, plain = post_all(
        path,
        dict(prompt=IDS[0], n=2, prompt_logprobs=3, **sampled),
        dict(path=CHAT, messages=messages, max_tokens=2, prompt_logprobs=1, return_token_ids=True),
        dict(prompt=IDS[0], prompt_logprobs=1, logprobs=3, echo=True, max_tokens=2),
        dict(prompt=IDS[0], max_tokens=2),
    )

    def as_json(output, top):
        return [
            entry
            and {
                str(token_id): {"logprob": one.logprob, "rank": one.rank, "decoded_token": f"w{token_id}"}
                for token_id, one in entry.items()
                if one.rank <= top or token_id == token
            }
            for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        ]

    assert [choice["prompt_logprobs"] for choice in completed["choices"]] == [as_json(wanted, 3)] * 2
    assert all(choice["logprobs"] is None for choice in completed["choices"])
    assert chatted["prompt_logprobs"] == as_json(talked, 1) and "prompt_logprobs" not in chatted["choices"][0]
    assert chatted["prompt_token_ids"] == talked.prompt_token_ids
    # Each shows as many as it was asked for.
    (choice,) = both["choices"]
    assert choice["prompt_logprobs"] == as_json(wanted, 1)
    assert {len(top) for top in choice["logprobs"]["top_logprobs"][1:]} == {3, 4}
    assert "prompt_logprobs" not in plain["choices"][0]


def test_without_a_tokenizer_tokens_have_their_ids_as_names(path):
    (answer,) = post_all(path, dict(prompt=[20, 21], echo=True, logprobs=0, max_tokens=0), skip_tokenizer_init=True)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["token_id:20", "token_id:21"]
