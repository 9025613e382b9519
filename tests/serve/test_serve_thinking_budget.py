"""Budgets of thinking in requests of all APIs, by every name that servers and clients have for one."""

import asyncio
import json

import pytest
from serving import events, serving
from structured import THINKING, fulfils, make_structured_checkpoint

from nanoinfer.serve.budgets import OTHER_NAMES
from nanoinfer.serve.errors import BadRequestError
from nanoinfer.serve.fields import Fields, checked
from nanoinfer.serve.messages_request import MessagesRequest
from nanoinfer.serve.protocol import ChatRequest, CompletionRequest
from nanoinfer.serve.responses_request import ResponsesRequest

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER = [{"role": "user", "content": "a question"}]
ROOM = dict(max_model_len=512, max_num_batched_tokens=128, resident_kv_limit=None)
SCHEMA = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_structured_checkpoint(tmp_path_factory.mktemp("model"), THINKING["begun"], ("<think>", "</think>"))


def how(served) -> dict:
    """Nothing ends by itself, and all that is said is ASCII."""
    tokenizer = served.engine.tokenizer
    letters = tokenizer.convert_tokens_to_ids([*"abcdefghijklmnopqrstuvwxyz", *'{}":,12', "Ġ", "</think>", "<end>"])
    ends = tokenizer.convert_tokens_to_ids(["<end>", "</think>", "Ġ"])
    return dict(temperature=1, seed=3, allowed_token_ids=letters, logit_bias=dict.fromkeys(map(str, ends), -100))


def test_every_name_in_every_api_gives_the_same_answer(path):
    async def ask():
        async with serving(path, **ROOM) as served:
            base = how(served) | dict(max_tokens=20)
            base.pop("allowed_token_ids")  # which not all of them have
            asked = [{name: 5} for name in ("thinking_token_budget", *OTHER_NAMES)]
            asked += [dict(thinking={"type": "enabled", "budget_tokens": 5}), dict(reasoning={"max_tokens": 5})]
            found = []
            for given in asked:
                (choice,) = (await served.post(CHAT, messages=USER, **base, **given)).json()["choices"]
                found.append((choice["message"]["reasoning_content"], choice["message"]["content"]))
            thought, text = found[0]
            assert thought and text and found == found[:1] * len(found)
            given = dict(thinking={"type": "enabled", "budget_tokens": 5})
            thinking, said = (await served.post(MESSAGES, messages=USER, **base, **given)).json()["content"]
            assert (thinking["thinking"], said["text"]) == (thought, text)
            base["max_output_tokens"] = base.pop("max_tokens")
            for given in (dict(reasoning={"max_tokens": 5}), dict(thinking_token_budget=5), dict(reasoning_budget=5)):
                thinking, said = (await served.post(RESPONSES, input="a question", **base, **given)).json()["output"]
                assert (thinking["content"][0]["text"], said["content"][0]["text"]) == (thought, text)

    asyncio.run(ask())


def test_small_and_large_budgets_streams_and_forms(path):
    async def ask():
        async with serving(path, **ROOM) as served:
            base = how(served) | dict(messages=USER, max_tokens=12, n=2)
            for budget, size in ((0, 0), (1, 1), (5, 5), (12, 12), (1000, 12), (-1, 12), (None, 12)):
                given = base | dict(thinking_token_budget=budget)
                whole = (await served.post(CHAT, **given)).json()["choices"]
                streamed = ["", ""], ["", ""]
                for event in events((await served.post(CHAT, **given, stream=True)).text):
                    for choice in event["choices"]:
                        streamed[0][choice["index"]] += choice["delta"].get("reasoning_content") or ""
                        streamed[1][choice["index"]] += choice["delta"].get("content") or ""
                for index, choice in enumerate(whole):
                    thought, text = choice["message"].get("reasoning_content") or "", choice["message"]["content"]
                    assert len(thought) == size and (thought, text) == (streamed[0][index], streamed[1][index])
                    assert bool(text) == (size < 11) and choice["finish_reason"] == "length"
            base.pop("logit_bias")
            base["max_tokens"] = 30
            answer = await served.post(CHAT, **base | dict(thinking_token_budget=4, response_format=FORMAT))
            for choice in answer.json()["choices"]:
                assert fulfils(json.loads(choice["message"]["content"]), SCHEMA)
                assert len(choice["message"].get("reasoning_content") or "") <= 4

    asyncio.run(ask())


def test_completions_have_it_for_prompts_that_begin_to_think(path):
    async def ask():
        async with serving(path, **ROOM) as served:
            given = how(served) | dict(max_tokens=12, thinking_token_budget=3)
            texts = [
                (await served.post(prompt=f"Q?{end}", **given)).json()["choices"][0]["text"]
                for end in ("", "<think>\n")
            ]
            assert "</think>" not in texts[0] and texts[1].index("</think>") == 3

    asyncio.run(ask())


def test_without_a_parser_of_thinking_it_is_refused_but_where_clients_always_send_it(path):
    async def ask():
        async with serving(path, app_options=dict(reasoning_parser="none"), **ROOM) as served:
            answer = await served.post(CHAT, messages=USER, max_tokens=3, thinking_token_budget=3)
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "thinking_token_budget"
            given = dict(thinking={"type": "enabled", "budget_tokens": 5})
            assert (await served.post(MESSAGES, messages=USER, max_tokens=3, **given)).status_code == 200

    asyncio.run(ask())


def chat(**given):
    return checked(ChatRequest, dict(messages=USER, **given), Fields())


def test_names_may_say_the_same_again_and_nothing_else():
    assert chat(thinking_budget=5, reasoning_budget=5).thinking_token_budget == 5
    assert chat(thinking_budget=None, reasoning={"effort": "low"}).reasoning_effort == "low"
    assert chat(thinking={"type": "disabled"}).reasoning_effort == "none"
    assert chat(reasoning={"enabled": False}).reasoning_effort == "none"
    assert chat(reasoning={"exclude": True, "max_tokens": 4}).include_reasoning is False
    for given, message in (
        (
            dict(thinking_budget=5, reasoning_budget=6),
            "thinking_budget says thinking_token_budget=5 and reasoning_budget",
        ),
        (
            dict(thinking_token_budget=5, thinking={"type": "enabled", "budget_tokens": 6}),
            "and thinking says 6: give one",
        ),
        (
            dict(reasoning_effort="low", reasoning={"effort": "high"}),
            "reasoning_effort says reasoning_effort='low' and",
        ),
        (dict(reasoning_budget=-2), "reasoning_budget is -2: give how many tokens may be thought"),
        (dict(thinking_budget=True), "thinking_budget is True: give how many"),
        (dict(thinking={"type": "enabled", "budget_tokens": "5"}), "thinking.budget_tokens is '5': give how many"),
        (dict(thinking=5), "thinking is 5: give {"),
        (dict(thinking={"type": ["x"]}), "thinking is {"),
        (dict(reasoning="low"), "reasoning is 'low': give {"),
    ):
        with pytest.raises(BadRequestError) as caught:
            chat(**given)
        assert message in str(caught.value), (given, str(caught.value))


# What vLLM's, SGLang's, llama.cpp's and other servers' requests have, and would change an answer: a value that does.
CHANGING = dict(
    return_tokens_as_token_ids=True, add_special_tokens=True, echo=True, repetition_detection={"max_pattern_size": 3},
    stop_regex="a+", no_stop_trim=True, separate_reasoning=False, stream_reasoning=False, reasoning_format="none",
    samplers=["top_k"], n_probs=3, min_keep=2, post_sampling_probs=True, return_logprob=True, top_logprobs_num=2,
    custom_logit_processor="x", custom_params={"thinking_budget": 3}, vllm_xargs={"a": 1}, t_max_predict_ms=100,
    return_tokens=True, do_sample=False, ban_eos_token=True, banned_strings=["a"], custom_token_bans="5", n_indent=4,
    parse_tool_calls=False, grammar_lazy=True, enable_thinking=False, think=True, input_ids=[1], system="You are.",
    return_hidden_states=True, reasoning_budget_message="Enough.", transforms=["middle-out"], truncate=100,
)  # fmt: skip


@pytest.mark.parametrize("strict", [False, True])
def test_what_would_change_an_answer_is_refused_by_name_in_every_api(strict):
    kinds = {
        ChatRequest: dict(messages=USER), ResponsesRequest: dict(input="a"),
        MessagesRequest: dict(messages=USER, max_tokens=1), CompletionRequest: dict(prompt="a"),
    }  # fmt: skip
    for kind, needed in kinds.items():
        for name, value in CHANGING.items():
            if name in kind.model_fields:
                continue
            if (kind, name) == (CompletionRequest, "add_special_tokens"):
                value = False
            with pytest.raises(BadRequestError, match=f"{name}=.* is not supported") as caught:
                checked(kind, needed | {name: value}, Fields(refuses_unknown=strict))
            assert caught.value.param == name and caught.value.code == "unsupported_parameter"
