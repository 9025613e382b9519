"""What twelve front ends send, in the shape that their public sources give it: the path, headers and the body's fields.

Where a front end sends several kinds of request, each has its own row. `MODEL` and the words of texts are the tests'.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from serving import MODEL

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string"}},
    "required": ["path"],
    "additionalProperties": False,
}
READ = {"name": "read_file", "description": "Reads a file.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": READ}]
SYSTEM, USER = {"role": "system", "content": "w30"}, {"role": "user", "content": "w31 w32"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "w33"}'}}
TURN = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "w34"},
]
PARTS = {"role": "user", "content": [{"type": "text", "text": "w31"}, {"type": "text", "text": "w32"}]}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Asked:
    body: dict[str, Any]
    path: str = CHAT
    headers: dict[str, str] = field(default_factory=dict)


def chat(*messages: dict, **fields: Any) -> Asked:
    return Asked({"model": MODEL, "messages": list(messages or (SYSTEM, USER)), **fields})


FRONT_ENDS: dict[str, Asked] = {
    # open-webui: backend/open_webui/utils/payload.py, routers/openai.py
    "Open WebUI": chat(
        temperature=0.8, top_p=0.9, max_tokens=5, frequency_penalty=0.0, seed=42, stop=["w1 w1"], **STREAMED
    ),
    "Open WebUI, title": chat(USER, stream=False, max_completion_tokens=5),
    "Open WebUI, tools": chat(SYSTEM, USER, *TURN, tools=TOOLS, max_tokens=5, **STREAMED),
    # LibreChat: its agents ask through LangChain's client in JavaScript
    "LibreChat": chat(
        SYSTEM, PARTS, temperature=1, top_p=1, presence_penalty=0, frequency_penalty=0, max_tokens=5, user="65f0",
        tools=TOOLS, tool_choice="auto", **STREAMED,
    ),
    # cline: src/core/api/providers/openai.ts
    "Cline": chat(SYSTEM, PARTS, temperature=0, max_tokens=5, **STREAMED),
    "Cline, tools": chat(SYSTEM, PARTS, *TURN, temperature=0, max_tokens=5, tools=TOOLS, **STREAMED),
    # continue: core/llm/openaiTypeConverters.ts
    "Continue": chat(
        SYSTEM, USER, {"role": "assistant", "content": " ", "tool_calls": [CALL]}, TURN[1], max_tokens=5,
        temperature=0.5, top_p=None, frequency_penalty=None, presence_penalty=None, stop=[], stream=True,
        tools=[{"type": "function", "function": READ | {"strict": False}}],
    ),
    "Continue, completion": Asked(
        dict(model=MODEL, prompt="w31 w32", max_tokens=5, temperature=0.01, stream=True, stop=["w1 w1", "w2 w2"]),
        COMPLETIONS,
    ),
    # zed: crates/open_ai/src/open_ai.rs
    "Zed": chat(
        SYSTEM, USER, *TURN, max_completion_tokens=5, temperature=1.0, tool_choice="auto", tools=TOOLS, stop=["w1 w1"],
        prompt_cache_key="thread", **STREAMED,
    ),
    # opencode: through the AI SDK's provider for servers like OpenAI's
    "OpenCode": chat(
        SYSTEM, USER, *TURN, max_tokens=5, temperature=0, top_p=1, tools=TOOLS, tool_choice="auto", **STREAMED
    ),
    # anthropics/claude-code, as proxies and servers for it describe its requests
    "Claude Code": Asked(
        dict(
            model=MODEL, max_tokens=32_000, temperature=1, stream=True,
            system=[
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.15; cch=00000;"},
                {"type": "text", "text": "w30", "cache_control": {"type": "ephemeral"}},
            ],
            messages=[
                {"role": "user", "content": [{"type": "text", "text": "w31"}, {"type": "text", "text": "w32"}]},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "w35", "signature": ""},
                    {"type": "tool_use", "id": "call_1", "name": "read_file", "input": {"path": "w33"}},
                ]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "w34", "is_error": False,
                     "cache_control": {"type": "ephemeral"}},
                ]},
            ],
            tools=[{"name": "read_file", "description": "Reads a file.", "input_schema": SCHEMA}],
            thinking={"type": "adaptive"}, output_config={"effort": "medium"}, metadata={"user_id": "user_1"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        ),
        f"{MESSAGES}?beta=true",
        {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,context-management-2025-06-27"},
    ),
    # codex: codex-rs/codex-api/src/common.rs, protocol/src/models.rs
    "Codex": Asked(
        dict(
            model=MODEL, instructions="w30", stream=True, store=False, tool_choice="auto", parallel_tool_calls=False,
            input=[
                {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "w36"}]},
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "w31 w32"}]},
                {"type": "reasoning", "summary": [], "encrypted_content": "w35"},
                {"type": "function_call", "name": "read_file", "arguments": '{"path": "w33"}', "call_id": "call_1"},
                {"type": "function_call_output", "call_id": "call_1", "output": "w34"},
            ],
            tools=[
                {"type": "function", **READ, "strict": False},
                {"type": "custom", "name": "apply_patch", "description": "w37", "format": {
                    "type": "grammar", "syntax": "lark", "definition": "start: w38"}},
                {"type": "web_search", "external_web_access": False},
            ],
            reasoning={"effort": "medium", "summary": "auto"}, include=["reasoning.encrypted_content"],
            prompt_cache_key="thread", client_metadata={"x-codex-installation-id": "1"},
        ),
        RESPONSES,
    ),
    # SillyTavern: public/scripts/textgen-settings.js, src/endpoints/backends
    "SillyTavern, chat": chat(
        temperature=1, max_tokens=5, stream=True, presence_penalty=0, frequency_penalty=0, top_p=1, stop=["w1 w1"],
        logit_bias={}, seed=7, n=1,
    ),
    "SillyTavern, text": Asked(
        dict(
            model=MODEL, prompt="w31 w32", max_new_tokens=5, max_tokens=5, temperature=1, temperature_last=False,
            top_p=1, typical_p=1, typical=1, min_p=0, repetition_penalty=1, rep_pen_range=0, repetition_penalty_range=0,
            encoder_repetition_penalty=1, frequency_penalty=0, presence_penalty=0, top_k=0, skew=0, min_tokens=0,
            no_repeat_ngram_size=0, num_beams=1, penalty_alpha=0, length_penalty=1, early_stopping=False,
            guidance_scale=1, negative_prompt="", seed=7, add_bos_token=True, stop=["w1 w1"],
            stopping_strings=["w1 w1"], truncation_length=4096, ban_eos_token=False, skip_special_tokens=True, top_a=0,
            tfs=1, epsilon_cutoff=0, eta_cutoff=0, mirostat_mode=0, mirostat_tau=5, mirostat_eta=0.1,
            grammar_string="", custom_token_bans="",
            include_reasoning=True, stream=True,
        ),
        COMPLETIONS,
    ),
    # langchain-openai: chat_models/base.py; without a limit where none is set
    "LangChain": chat(USER, temperature=0.7, max_completion_tokens=5, stream=False),
    "LangChain, stream and tools": chat(
        USER, {**TURN[0], "content": ""}, TURN[1], temperature=0.7, max_tokens=5, n=1, tools=TOOLS,
        parallel_tool_calls=False, **STREAMED,
    ),
    # llama-index-llms-openai-like
    "LlamaIndex": chat(USER, temperature=0.1, max_tokens=5, stream=False),
    "LlamaIndex, completion": Asked(
        dict(model=MODEL, prompt="w31 w32", temperature=0.1, max_tokens=5, stream=False), COMPLETIONS
    ),
    # lm-evaluation-harness: lm_eval/models/openai_completions.py
    "lm-eval": Asked(
        dict(model=MODEL, prompt=[[31, 32]], max_tokens=5, temperature=0, stop=["w1 w1", "</s>"], seed=1234),
        COMPLETIONS,
    ),
    "lm-eval, chat": chat(USER, max_tokens=5, temperature=0, stop=["w1 w1"], seed=1234),
}  # fmt: skip
