"""Tools and thinking over HTTP, with OpenAI's own client and the chat templates of published models."""

import asyncio
import json

import openai
import pytest
from scripted import ROOM, client_of, make_speaking_checkpoint, saying
from serving import MODEL, make_served_checkpoint, serving
from transformers import AutoTokenizer
from written_calls import LLAMA3, TEMPLATES

from nanoinfer import LLM, SamplingParams
from nanoinfer.common.errors import RequestError
from nanoinfer.parsers.answer_format import AnswerFormat
from nanoinfer.parsers.tools import shown_tools
from nanoinfer.serve.protocol import ChatRequest
from nanoinfer.serve.tool_use import ToolUse

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
ASKED = [{"role": "user", "content": "Hi"}]
CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris \\"a\\" é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
ANSWER = f"<think>\nI look.\n</think>\n\nLet me see.\n{CALLS}"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>", "<|pad|>")


def template(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tags = (
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "',
        '", "arguments": ',
        "get_weather",
        "clock",
    )
    return make_speaking_checkpoint(tmp_path_factory.mktemp("qwen3"), template("Qwen-Qwen3-0.6B"), tags)


@pytest.fixture(scope="module")
def oss(tmp_path_factory):
    return make_speaking_checkpoint(tmp_path_factory.mktemp("oss"), template("openai-gpt-oss-120b"), special=HARMONY)


def ask(path, texts, *requests, **arguments):
    """The answers of the official client to each request, of whom every completion says the texts."""
    tokenizer = AutoTokenizer.from_pretrained(path)

    async def run():
        async with client_of(path, **arguments) as (client, _):
            with saying(tokenizer, *texts):
                return [await one(client, **request) for request in requests]

    async def one(client, **request):
        how = dict(model=MODEL, messages=ASKED, temperature=0) | request
        answer = await client.chat.completions.create(**how)
        return [chunk async for chunk in answer] if request.get("stream") else answer

    return asyncio.run(run())


def joined(chunks, index=0):
    """What a stream's deltas make together: fields of text, calls by their index, and the reason of the end."""
    texts, calls, reason = {}, {}, None
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index != index:
                continue
            delta = choice.delta.model_dump(exclude_none=True)
            for name in ("content", "reasoning_content", "reasoning"):
                texts[name] = texts.get(name, "") + delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] not in calls:
                    assert call["type"] == "function" and call["id"] and call["function"]["name"]
                    calls[call["index"]] = [call["id"], call["function"]["name"], ""]
                else:
                    assert "id" not in call and "name" not in call["function"]
                calls[call["index"]][2] += call["function"]["arguments"]
            reason = choice.finish_reason or reason
    return texts, [calls[index] for index in sorted(calls)], reason


def test_calls_come_whole_and_in_pieces(path):
    whole, streamed, one = ask(
        path, [ANSWER], dict(tools=TOOLS), dict(tools=TOOLS, stream=True),
        dict(tools=TOOLS, parallel_tool_calls=False, extra_body={"include_reasoning": False}),
    )  # fmt: skip
    (choice,) = whole.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.reasoning_content == choice.message.reasoning == "I look."
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name) for call in calls] == [("function", "get_weather"), ("function", "clock")]
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": 'Paris "a" é'}, {}]
    assert len({call.id for call in calls}) == 2 and all(call.id.startswith("call_") for call in calls)
    texts, found, reason = joined(streamed)
    assert texts == {"content": "Let me see.", "reasoning_content": "I look.", "reasoning": "I look."}
    assert [call[1:] for call in found] == [[call.function.name, call.function.arguments] for call in calls]
    assert reason == "tool_calls"
    num_pieces = sum(bool(chunk.choices[0].delta.tool_calls) for chunk in streamed)
    assert num_pieces > 5, "arguments came at once"
    assert [call.function.name for call in one.choices[0].message.tool_calls] == ["get_weather"]
    assert one.choices[0].message.content == "Let me see." and not hasattr(one.choices[0].message, "reasoning")


def test_only_calls_have_no_content_and_no_call_stays_as_it_is(path):
    texts = [CALLS, "<tool_call>no call</tool_call>", '<tool_call>{"name": "clock", "arguments": {"a": 1', "Yes."]
    (whole, streamed), (cut,) = (
        ask(path, texts, dict(n=4, tools=TOOLS), dict(n=4, tools=TOOLS, stream=True)),
        ask(path, [texts[2]], dict(tools=TOOLS, max_tokens=5)),
    )
    messages = [choice.message for choice in whole.choices]
    assert messages[0].content is None and len(messages[0].tool_calls) == 2
    assert messages[1].content == texts[1] and messages[1].tool_calls is None
    assert messages[2].tool_calls[0].function.arguments == '{"a": 1'
    assert (messages[3].content, whole.choices[3].finish_reason) == ("Yes.", "stop")
    for index, choice in enumerate(whole.choices):
        found = joined(streamed, index)
        assert found[0].get("content") == (choice.message.content or "") and found[2] == choice.finish_reason
        assert len(found[1]) == len(choice.message.tool_calls or ())
    assert cut.choices[0].finish_reason == "length"


def test_without_tools_or_with_none_to_choose_the_text_is_the_answer(path):
    text = '<tool_call>\n{"name": "clock"}\n</tool_call>'
    answers = ask(
        path, [text], {}, dict(tools=TOOLS, tool_choice="none"), dict(tools=[]), dict(tools=[], tool_choice="auto"),
        dict(tools=TOOLS),
    )  # fmt: skip
    assert [answer.choices[0].message.content for answer in answers[:4]] == [text] * 4
    prompts = [answer.usage.prompt_tokens for answer in answers]
    assert len(set(prompts[:4])) == 1 and prompts[4] > prompts[0]


HISTORY = [
    *ASKED,
    {
        "role": "assistant", "content": None, "reasoning": "Hm.",
        "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": text}}
            for n, (name, text) in enumerate([("get_weather", '{"city": "Paris"}'), ("clock", "")])
        ],
    },
    {"role": "tool", "tool_call_id": "c0", "content": [{"type": "text", "text": "mild"}]},
    {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
]  # fmt: skip
PLAIN = [
    *ASKED,
    {
        "role": "assistant", "content": "", "reasoning_content": "Hm.",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}},
            {"type": "function", "function": {"name": "clock", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "mild"},
    {"role": "tool", "content": "12:00"},
]  # fmt: skip


def test_a_history_with_calls_is_rendered_as_transformers_does(path):
    extra = {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": True}}
    how = dict(messages=HISTORY, tools=TOOLS)
    answers = ask(
        path, ["x"], dict(extra_body=extra, **how),
        dict(extra_body={"return_token_ids": True}, reasoning_effort="none", **how),
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(path)
    for answer, thinks in zip(answers, (True, False), strict=True):
        wanted = tokenizer.apply_chat_template(
            PLAIN, tools=shown_tools(TOOLS), add_generation_prompt=True, enable_thinking=thinks, return_dict=False
        )
        assert answer.prompt_token_ids == wanted
    with LLM(path, device="cpu", dtype="float32", progress_bar=False, block_size=16, **ROOM) as llm:
        (output,) = llm.chat(HISTORY, tools=TOOLS, chat_template_kwargs={"enable_thinking": True}, use_tqdm=False)
        assert output.prompt_token_ids == answers[0].prompt_token_ids
        with pytest.raises(ValueError, match=r"tools\[0\] is .*: only functions are tools here"):
            llm.chat(ASKED, tools=[{"type": "web_search"}])


def test_messages_of_gpt_oss_are_told_apart_and_special_tokens_are_not_shown(oss):
    texts = [
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.clock "
        '<|constrain|>json<|message|>{"a": 1}',
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes<|pad|>!",
    ]
    whole, streamed, shown = ask(
        oss, texts, dict(n=2, tools=TOOLS), dict(n=2, tools=TOOLS, stream=True, reasoning_effort="high"),
        dict(n=2, extra_body={"skip_special_tokens": False}),
    )  # fmt: skip
    called, answered = (choice.message for choice in whole.choices)
    assert called.reasoning_content == answered.reasoning_content == "Hm."
    assert [(call.function.name, call.function.arguments) for call in called.tool_calls] == [("clock", '{"a": 1}')]
    assert answered.content == "Yes!" and [choice.finish_reason for choice in whole.choices] == ["tool_calls", "stop"]
    assert joined(streamed, 0)[1][0][1:] == ["clock", '{"a": 1}'] and joined(streamed, 1)[0]["content"] == "Yes!"
    assert shown.choices[1].message.content == "Yes<|pad|>!"
    assert shown.choices[0].message.content == '{"a": 1}' and not shown.choices[0].message.tool_calls


UNIT = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object", "properties": {"unit": {"enum": ["C", "F"]}, "on": {"type": "boolean"}},
            "required": ["unit", "on"], "additionalProperties": False,
        },
    },
}  # fmt: skip


def test_a_random_model_calls_what_it_must_with_arguments_that_fit(path):
    pytest.importorskip("llguidance")
    named, how = {"type": "function", "function": {"name": "clock"}}, dict(temperature=1, seed=5, max_tokens=300)
    how |= dict(extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    other = {"type": "function", "function": {"name": "clock", "parameters": UNIT["function"]["parameters"]}}

    async def run():
        async with client_of(path) as (client, _):
            create = client.chat.completions.create
            asked = dict(model=MODEL, messages=ASKED, parallel_tool_calls=False, tools=[UNIT, other], **how)
            many = await create(n=4, tool_choice="required", **asked)
            streamed = [chunk async for chunk in await create(tool_choice="required", stream=True, **asked)]
            with pytest.raises(openai.BadRequestError, match="asks for calls, and another field for another"):
                await create(
                    tool_choice="required", **(asked | dict(extra_body={"structured_outputs": {"choice": ["x"]}}))
                )
            return many, streamed, await create(tool_choice=named, **asked)

    many, streamed, one = asyncio.run(run())
    for choice in (*many.choices, *one.choices):
        (call,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"unit", "on"} and arguments["unit"] in "CF" and isinstance(arguments["on"], bool)
    assert one.choices[0].message.tool_calls[0].function.name == "clock"
    first = many.choices[0].message.tool_calls[0].function
    assert joined(streamed)[1][0][1:] == [first.name, first.arguments]  # of the same seed


def deep(levels):
    schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


UNIQUE = tool(name="tags", parameters={"properties": {"x": {"type": "array", "uniqueItems": True}}})


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(tools=[{"type": "web_search"}]), r"tools\[0\] is .*: only functions are tools here"),
        (dict(tools=[tool(name="a b")]), r"tools\[0\].function.name is 'a b': give up to 128 letters"),
        (dict(tools=[CLOCK, CLOCK]), r"tools\[1\].function.name is 'clock', as that of another tool"),
        (dict(tools=[tool(parameters=[])]), r"tools\[0\].function.parameters is \[\]: give a JSON Schema"),
        (dict(tools=[tool(strict="yes")]), r"tools\[0\].function.strict is 'yes': give true or false"),
        (dict(tools=[tool(parameters=deep(60))]), r"tools\[0\].function.parameters has more than 100 levels"),
        (dict(tools=[tool(name=f"f{n}") for n in range(1025)]), "there are 1025 tools, 1024 are possible"),
        (dict(tools=TOOLS, tool_choice="any"), "tool_choice is 'any': give \"none\", \"auto\", \"required\""),
        (dict(tool_choice="required"), 'tool_choice is "required", but there are no tools'),
        (
            dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "clok"}}),
            r"tool_choice names 'clok', which no tool is called \(did you mean 'clock'\?\)",
        ),
        (dict(reasoning_effort="huge"), "reasoning_effort is 'huge'"),
        (dict(messages=[{"role": "assistant", "tool_calls": [{}]}]), r"messages\[0\].tool_calls\[0\] is {}: give"),
        (dict(messages=[{"role": "assistant", "tool_calls": "x"}]), r"messages\[0\].tool_calls is 'x': give a list"),
        (dict(messages=[{"role": "assistant", "function_call": {"name": "f"}}]), "function_call is not supported"),
        (dict(tools=[tool(name=f"f{n}") for n in range(1000)]), "max_model_len=2048"),
        (
            dict(tools=[CLOCK, UNIQUE, WEATHER], tool_choice="required"),
            r"calls of the tool 'tags' cannot be made to follow its schema, as tool_choice asks: Unimplemented keys: "
            r'\["uniqueItems"\]: change the schema, or leave it to the model \(tool_choice "auto", no strict\)',
        ),
        (dict(tools=[CLOCK, tool(**UNIQUE["function"], strict=True)]), "calls of the tool 'tags'.*, as strict asks: "),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_what_is_allowed(served_qwen, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        served_qwen(**fields)


@pytest.fixture(scope="module")
def served_qwen(path):
    """Asks one server; in one event loop."""
    with asyncio.Runner() as runner:
        context = client_of(path)

        async def enter():
            return await context.__aenter__()

        client, _ = runner.run(enter())

        async def create(**fields):
            return await client.chat.completions.create(**(dict(model=MODEL, messages=ASKED, max_tokens=1) | fields))

        yield lambda **fields: runner.run(create(**fields))
        runner.run(context.__aexit__(None, None, None))


def test_tools_that_are_too_large_together_are_refused_with_what_to_do():
    form = AnswerFormat.of(template("Qwen-Qwen3-0.6B"))
    schemas = [{"properties": {f"property {n}": {"const": "x" * 1100}}} for n in range(1024)]
    tools = [tool(name=f"f{n}", parameters=schema) for n, schema in enumerate(schemas)]
    asked = ChatRequest(messages=ASKED, tools=tools)
    use = ToolUse.of(asked.model_copy(update={"tool_choice": "required"}), form)
    with pytest.raises(RequestError, match="calls of 1024 tools .*: their grammar would have .*: give fewer tools"):
        use.constrained(SamplingParams(), form, "")
    reason = "structured_outputs.grammar cannot be generated: it needs more symbols than the 65,524 that ..."
    found = use.explained(RequestError(reason, field="structured_outputs"), "start: call")
    assert str(found).startswith("calls of 1024 tools cannot be made to follow their schemas, as tool_choice asks: it")
    assert found.field == "tools"


def test_a_schema_of_ten_thousand_levels_is_refused_and_others_go_on(path):
    async def run():
        async with serving(path, **ROOM) as served:
            nested = '{"a":' * 10_000 + "1" + "}" * 10_000
            body = json.dumps({"messages": ASKED, "tools": [tool(parameters="SCHEMA")]}).replace('"SCHEMA"', nested)
            refused = await served.client.post("/v1/chat/completions", content=body)
            nested = json.loads('{"a":' * 199 + "1" + "}" * 199)
            answer = await served.post("/v1/chat/completions", messages=ASKED, max_tokens=1, ignored=nested)
            return refused, answer

    refused, answer = asyncio.run(run())
    assert refused.status_code == 400 and "nested too deeply, 200 levels are possible" in refused.text
    assert answer.status_code == 200


def test_a_model_without_tools_says_what_to_do(tmp_path):
    path = make_served_checkpoint(tmp_path)

    async def run():
        found = []
        for options in ({}, {"tool_call_parser": "hermes"}):
            async with serving(path, app_options=options) as served:
                for choice in ("auto", "none"):
                    fields = dict(messages=ASKED, tools=TOOLS, tool_choice=choice, max_tokens=1)
                    found.append(await served.post("/v1/chat/completions", **fields))
        return found

    refused, taken, also, _ = asyncio.run(run())
    for answer in (refused, also):
        assert answer.status_code == 400
        assert "as its chat template says nothing of tools: start the server with --chat-template FILE" in answer.text
    assert taken.status_code == 200


def test_a_parser_may_be_named(tmp_path):
    path = make_speaking_checkpoint(tmp_path, LLAMA3)
    text = '{"name": "clock", "parameters": {}}'
    (by_template,) = ask(path, [text], dict(tools=TOOLS))
    (named,) = ask(path, [text], dict(tools=TOOLS), app_options=dict(tool_call_parser="hermes"))
    (no_thinking,) = ask(path, ["<think>a</think>b"], {}, app_options=dict(reasoning_parser="none"))
    assert by_template.choices[0].message.tool_calls[0].function.name == "clock"
    assert named.choices[0].message.content == text
    assert no_thinking.choices[0].message.content == "<think>a</think>b"
