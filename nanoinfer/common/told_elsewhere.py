"""What a command has no option for because it is said elsewhere: in a request, in a chat, or by another option."""

from __future__ import annotations

from nanoinfer.common.tables import by_name

_THINKING = "reasoning think thinking enable_thinking hidethinking chat_template_kwargs default_chat_template_kwargs"
_PENALTIES = "repeat_penalty repetition_penalty presence_penalty frequency_penalty ignore_eos min_tokens min_new_tokens"
_SAMPLING = (
    "temperature temp top_p top_k min_p stop logit_bias bad_words max_tokens n n_predict num_predict max_new_tokens"
)

_OF_SERVE = {"host port api_key allowed_origins served_model_name": "nanoinfer serve has it"}

# Of each command: the options that its users look for, and where that is said.
TOLD_ELSEWHERE: dict[str, dict[str, str]] = {
    "serve": by_name(
        {
            _THINKING: 'each request says it, as "reasoning_effort": "none" or '
            '"chat_template_kwargs": {"enable_thinking": false}',
            "reasoning_budget thinking_budget thinking_token_budget": "each request says it, as thinking_token_budget",
            "system sys system_prompt prompt p": "clients send it with each request, as a message",
            f"{_SAMPLING} {_PENALTIES}": "clients send it with each request, and where they do not, the checkpoint's "
            "generation_config.json counts",
            "disable_log_requests enable_log_requests max_log_len log_requests disable_access_log "
            "disable_uvicorn_access_log log_disable": "--log-level warning logs no requests, info a line for each",
            "reasoning_format": "--reasoning-parser none leaves what is thought in the content",
            "allowed_methods allowed_headers allow_credentials": "--allowed-origins says which web pages may use it",
            "tools tool": "each request has its own tools",
            "api_key_file": 'give its text: --api-key "$(cat FILE)"',
        }
    ),
    "chat": by_name(
        {
            "reasoning think thinking enable_thinking hidethinking default_chat_template_kwargs": "type /set nothink "
            "in the chat, or give --chat-template-kwargs '{\"enable_thinking\": false}'",
            _PENALTIES: "set it in the chat, such as /set repetition_penalty 1.1",
            "verbose v": "a line below each answer has its figures, and /stats more",
        }
        | _OF_SERVE
    ),
    "generate": by_name(
        {
            _THINKING: "nanoinfer chat has --chat-template-kwargs, and requests and LLM.chat have chat_template_kwargs",
            _PENALTIES: "nanoinfer chat has it as /set, requests and SamplingParams have it by its name, such as "
            "repetition_penalty",
            "verbose v": "the line behind the text has its figures",
            "stream": "a text is printed as it comes",
            "logprobs top_logprobs prompt_logprobs": "requests and SamplingParams have it",
        }
        | _OF_SERVE
    ),
    "bench": by_name({"serve serving": "tools/serve_load.py measures a server under load"}),
    "bench offload": by_name({"p n_prompt pg n_gen": "nanoinfer bench latency has --input-len and --output-len"}),
    "plan": by_name({"device dev": "give the card with --gpu, or its memory with --gpu-memory-limit"} | _OF_SERVE),
}
