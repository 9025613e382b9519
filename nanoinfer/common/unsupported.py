"""vLLM arguments that this engine does not have. They are refused by name, unless the value asks for nothing.

Each table: name -> (values that mean the same as leaving it out, what to do instead). None is always such a value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Table = Mapping[str, tuple[tuple, str]]

_LEAVE_OUT = "leave it out"
_ONE_GPU = "one GPU per engine"
_NO_LORA = "merge the adapter into the weights"
_TEXT_ONLY = "models take text only"
_NO_STRUCTURE = "check the text, and ask again where it does not fit"
_NO_SPECULATION = "there is no speculative decoding"
_DOWNLOAD = "download the checkpoint and give its directory"

ENGINE: Table = {
    "tensor_parallel_size": ((1,), _ONE_GPU),
    "pipeline_parallel_size": ((1,), _ONE_GPU),
    "data_parallel_size": ((1,), _ONE_GPU),
    "decode_context_parallel_size": ((1,), _ONE_GPU),
    "enable_expert_parallel": ((False,), _ONE_GPU),
    "distributed_executor_backend": (("uni",), _ONE_GPU),
    "disable_custom_all_reduce": ((True, False), _ONE_GPU),
    "trust_remote_code": ((False,), "no code of a checkpoint is run"),
    "quantization": ((), "weights are bfloat16, float16 or float32"),
    "revision": ((), _DOWNLOAD),
    "code_revision": ((), "no code of a checkpoint is run"),
    "tokenizer_revision": ((), "download the tokenizer and give its directory"),
    "tokenizer_mode": (("auto",), _LEAVE_OUT),
    "download_dir": ((), "set the environment variable HF_HOME"),
    "hf_overrides": (({},), "change the checkpoint's config.json"),
    "rope_scaling": (({},), "change the checkpoint's config.json"),
    "rope_theta": ((), "change the checkpoint's config.json"),
    "override_generation_config": (({},), 'give SamplingParams, or generation_config="vllm"'),
    "task": (("auto", "generate"), "models generate text only"),
    "runner": (("auto", "generate"), "models generate text only"),
    "served_model_name": ((), "it is an option of nanoinfer serve"),
    "cpu_offload_gb": ((0,), "in vLLM it offloads weights, which stay on the GPU here; enable_cpu_offload=True moves "
                             "the KV cache"),
    "swap_space": ((0, 4), "host_memory_limit bounds the host memory for KV blocks"),
    "kv_offloading_size": ((), "give host_memory_limit and enable_cpu_offload=True"),
    "kv_cache_memory_bytes": ((), "give gpu_memory_limit, which bounds all that the engine takes"),
    "calculate_kv_scales": ((False,), "the scale of an fp8 KV cache is 1"),
    "max_seq_len_to_capture": ((8192,), "graphs serve every length"),
    "cudagraph_capture_sizes": ((), "give cuda_graph_batch_sizes and capture_num_tokens"),
    "compilation_config": (({}, 0), "give enforce_eager, cuda_graph_batch_sizes and capture_num_tokens"),
    "enable_chunked_prefill": ((True,), "prompts are computed in chunks of max_num_batched_tokens"),
    "num_scheduler_steps": ((1,), _LEAVE_OUT),
    "scheduling_policy": (("fcfs",), "requests are taken first come, first served"),
    "async_scheduling": ((True,), "the host always runs one step ahead"),
    "disable_log_stats": ((True,), "llm.stats() has the counters, and nanoinfer serve has /metrics"),
    "max_logprobs": ((20,), "SamplingParams takes at most logprobs=20"),
    "logits_processors": (([],), _LEAVE_OUT),
    "enable_sleep_mode": ((False,), "close() gives all memory back"),
    "enable_prompt_embeds": ((False,), "prompts are text or token ids"),
    "enable_lora": ((False,), _NO_LORA),
    "max_loras": ((1,), _NO_LORA),
    "max_lora_rank": ((16,), _NO_LORA),
    "max_cpu_loras": ((), _NO_LORA),
    "lora_dtype": (("auto",), _NO_LORA),
    "fully_sharded_loras": ((False,), _NO_LORA),
    "enable_prompt_adapter": ((False,), _LEAVE_OUT),
    "speculative_model": ((), _NO_SPECULATION),
    "speculative_config": ((), _NO_SPECULATION),
    "num_speculative_tokens": ((0,), _NO_SPECULATION),
    "guided_decoding_backend": (("auto",), _NO_STRUCTURE),
    "structured_outputs_config": (({},), _NO_STRUCTURE),
    "reasoning_parser": (("",), "the text is returned as it is generated"),
    "limit_mm_per_prompt": (({},), _TEXT_ONLY),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
    "allowed_local_media_path": (("",), _TEXT_ONLY),
}  # fmt: skip

SAMPLING: Table = {
    "best_of": ((1,), "all n completions are returned"),
    "use_beam_search": ((False,), "use n and sampling"),
    "length_penalty": ((1,), _LEAVE_OUT),
    "early_stopping": ((False,), _LEAVE_OUT),
    "prompt_logprobs": ((), "logprobs are those of generated tokens"),
    "logit_bias": (({},), _LEAVE_OUT),
    "logits_processors": (([],), _LEAVE_OUT),
    "allowed_token_ids": ((), _LEAVE_OUT),
    "bad_words": (([],), _LEAVE_OUT),
    "guided_decoding": ((), _NO_STRUCTURE),
    "structured_outputs": ((), _NO_STRUCTURE),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "detokenize": ((True,), "give skip_tokenizer_init=True to the LLM"),
    "spaces_between_special_tokens": ((True,), _LEAVE_OUT),
    "include_stop_str_in_output": ((False,), "add the stop_reason of the answer yourself"),
    "output_kind": ((), "generate() gives whole completions, generate_stream() what they gained"),
    "extra_args": (({},), _LEAVE_OUT),
}

GENERATE: Table = {
    "lora_request": ((), _NO_LORA),
    "prompt_adapter_request": ((), _LEAVE_OUT),
    "priority": ((0,), "requests are taken first come, first served"),
    "prompt_token_ids": ((), 'give {"prompt_token_ids": ids} or the ids themselves as prompts'),
    "guided_options_request": ((), _NO_STRUCTURE),
    "tokenization_kwargs": (({},), "give token ids, from get_tokenizer()"),
}

_RENDER = "render the conversation with get_tokenizer().apply_chat_template() and complete it with generate()"
CHAT: Table = GENERATE | {
    "chat_template": ((), _RENDER),
    "chat_template_kwargs": (({},), _RENDER),
    "chat_template_content_format": (("auto", "string"), "contents are text"),
    "continue_final_message": ((False,), _RENDER),
    "tools": (([],), _RENDER),
    "mm_processor_kwargs": (({},), _TEXT_ONLY),
}


def refuse_unsupported(given: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """Return the given arguments without those in the table, whose values must mean the same as leaving them out.

    Raises:
        ValueError: an argument in the table asks for something. The message says which value is accepted, and what to
            do instead.
    """
    for name, value in given.items():
        if name in table and (message := refusal(name, value, table)):
            raise ValueError(message)
    return {name: value for name, value in given.items() if name not in table}


def refusal(
    name: str,
    value: Any,
    table: Table,
    show: Callable[[Any], str] = repr,
    show_neutral: Callable[[Any], str] = repr,
) -> str | None:
    """Return why this value cannot be taken, or None if it means the same as leaving the argument out."""
    neutral, instead = table[name]
    if value is None or any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in neutral):
        return None
    only = f", but for {show_neutral(neutral[0])}" if neutral else ""
    return f"{name}={show(value)} is not supported{only}: {instead}"
