"""vLLM arguments that this engine does not have. They are refused by name, unless the value asks for nothing.

Each table: name -> (values that mean the same as leaving it out, what to do instead). None is always such a value.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from nanoinfer.common.errors import UnknownNameError, unknown

Table = Mapping[str, tuple[tuple, str]]

LEAVE_OUT = "leave it out"
_TEXT_ONLY = "models take text only"
FIRST_COME = "requests are taken first come, first served"
_ONE_BACKEND = "llguidance makes the masks, and there is no other"
_NO_LORA = "merge the adapter into the weights"
_STRUCTURED = "give structured_outputs, with one of json, regex, choice, grammar, json_object, structural_tag"


def by_advice(advised: Mapping[str, Mapping[str, tuple]]) -> dict[str, tuple[tuple, str]]:
    """Return the table for advice -> {name: values that mean the same as leaving it out}."""
    return {name: (neutral, advice) for advice, names in advised.items() for name, neutral in names.items()}


ENGINE: Table = by_advice({
    "give tensor_parallel_size for several GPUs": dict(
        pipeline_parallel_size=(1,),
        decode_context_parallel_size=(1,), enable_expert_parallel=(False,), distributed_executor_backend=("uni", "mp"),
        disable_custom_all_reduce=(True, False),
    ),
    "give tensor_parallel_size for one engine on several GPUs, nanoinfer serve --ray --replicas for several": dict(
        data_parallel_size=(1,),
    ),
    "no code of a checkpoint is run": dict(trust_remote_code=(False,), code_revision=()),
    "download the checkpoint and give its directory": dict(revision=()),
    "download the tokenizer and give its directory": dict(tokenizer_revision=()),
    "set the environment variable HF_HOME": dict(download_dir=()),
    'give hf_overrides={"rope_parameters": ...}': dict(rope_scaling=({},), rope_theta=()),
    'give SamplingParams, or generation_config="vllm"': dict(override_generation_config=({},)),
    "models generate text only": dict(task=("auto", "generate"), runner=("auto", "generate")),
    "it is an option of nanoinfer serve": dict(served_model_name=()),
    "host_memory_limit bounds the host memory for KV blocks": dict(swap_space=(0, 4)),
    "give host_memory_limit and enable_cpu_offload=True": dict(kv_offloading_size=()),
    "give gpu_memory_limit, which bounds all that the engine takes": dict(kv_cache_memory_bytes=()),
    "the scale of an fp8 KV cache is 1": dict(calculate_kv_scales=(False,)),
    "graphs serve every length": dict(max_seq_len_to_capture=(8192,)),
    "give cuda_graph_batch_sizes and capture_num_tokens": dict(cudagraph_capture_sizes=()),
    "give enforce_eager, cuda_graph_batch_sizes and capture_num_tokens": dict(compilation_config=({}, 0)),
    "prompts are computed in chunks of max_num_batched_tokens": dict(enable_chunked_prefill=(True,)),
    FIRST_COME: dict(scheduling_policy=("fcfs",)),
    "the host always runs one step ahead": dict(async_scheduling=(True,)),
    "llm.stats() has the counters, and nanoinfer serve has /metrics": dict(disable_log_stats=(True,)),
    "SamplingParams takes at most logprobs=20": dict(max_logprobs=(20,)),
    "close() gives all memory back": dict(enable_sleep_mode=(False,)),
    "prompts are text or token ids": dict(enable_prompt_embeds=(False,)),
    _NO_LORA: dict(
        enable_lora=(False,), max_loras=(1,), max_lora_rank=(16,), max_cpu_loras=(), lora_dtype=("auto",),
        fully_sharded_loras=(False,),
    ),
    'give speculative_config={"method": "suffix"}': dict(speculative_model=(), num_speculative_tokens=(0,)),
    _ONE_BACKEND: dict(guided_decoding_backend=("auto", "guidance"), structured_outputs_config=({},)),
    "it is an option of nanoinfer serve; LLM returns the text as it is generated": dict(reasoning_parser=("",)),
    _TEXT_ONLY: dict(limit_mm_per_prompt=({},), mm_processor_kwargs=({},), allowed_local_media_path=("",)),
    LEAVE_OUT: dict(
        tokenizer_mode=("auto",), num_scheduler_steps=(1,), logits_processors=([],), enable_prompt_adapter=(False,)
    ),
})  # fmt: skip

SAMPLING: Table = by_advice({
    "all n completions are returned": dict(best_of=(1,)),
    "use n and sampling": dict(use_beam_search=(False,)),
    _STRUCTURED: dict(
        guided_decoding=(), guided_json=(), guided_regex=(), guided_choice=(), guided_grammar=(),
        guided_decoding_backend=("auto", "guidance"), guided_whitespace_pattern=(),
    ),
    "shorten the prompt": dict(truncate_prompt_tokens=()),
    "give frequency_penalty, presence_penalty or repetition_penalty": dict(repetition_detection=()),
    "generate() gives whole completions, generate_stream() what they gained": dict(output_kind=()),
    LEAVE_OUT: dict(
        length_penalty=(1,), early_stopping=(False,), logits_processors=([],), spaces_between_special_tokens=(True,),
        extra_args=({},), flat_logprobs=(False,),
    ),
})  # fmt: skip

STRUCTURED: Table = by_advice({
    _ONE_BACKEND: dict(backend=("auto", "guidance"), disable_fallback=(True, False)),
})  # fmt: skip

GENERATE: Table = by_advice({
    _NO_LORA: dict(lora_request=()),
    LEAVE_OUT: dict(prompt_adapter_request=()),
    FIRST_COME: dict(priority=(0,)),
    'give {"prompt_token_ids": ids} or the ids themselves as prompts': dict(prompt_token_ids=()),
    _STRUCTURED: dict(guided_options_request=()),
    "give token ids, from get_tokenizer()": dict(tokenization_kwargs=({},)),
})  # fmt: skip

CHAT: Table = GENERATE | by_advice({
    "contents are text": dict(chat_template_content_format=("auto", "string")),
    _TEXT_ONLY: dict(mm_processor_kwargs=({},)),
})  # fmt: skip


_TEXT_MODELS = "models here generate text"
MISSING_METHODS = {
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), f"{_TEXT_MODELS}: give no pooling model"),
    "beam_search": "use generate() with SamplingParams(n=...), which samples",
    **dict.fromkeys(("sleep", "wake_up"), "close() gives all memory back; switch_mode() moves the KV cache"),
    "start_profile": "nanoinfer bench --profile FILE writes a trace",
    "stop_profile": "nanoinfer bench --profile FILE writes a trace",
    "reset_prefix_cache": "a new LLM has an empty cache; enable_prefix_caching=False has none",
    "get_metrics": "stats() has the counters, and nanoinfer serve has /metrics",
    "collective_rpc": "llm.engine is the engine itself",
    "apply_model": "llm.engine.runner.model is the model itself",
}
"""Methods of vLLM's LLM that this one does not have: what to do instead."""


def check_keywords(cls: type, table: Table, taker: str) -> type:
    """Make a keyword-only dataclass take its fields and the names in the table only. Usable as a decorator.

    taker: as for `supported`.
    """
    generated_init = cls.__init__
    names = tuple(field.name for field in dataclasses.fields(cls) if field.init)

    @functools.wraps(generated_init)
    def __init__(self, *args, **kwargs):
        if args:
            raise TypeError(
                f"{cls.__name__} got {len(args)} positional argument(s), it takes keywords only: "
                f"name them, as in {cls.__name__}({names[0]}=...)."
            )
        generated_init(self, **supported(kwargs, table, names, taker))

    cls.__init__ = __init__
    return cls


def supported(arguments: Mapping[str, Any], table: Table, allowed: Collection[str], taker: str) -> dict[str, Any]:
    """Return the given arguments without those in the table, whose values must mean the same as leaving them out.

    Args:
        allowed: the names of all other arguments.
        taker: who was given the arguments, in the user's words ("LLM", "SamplingParams").

    Raises:
        ValueError: an argument in the table asks for something. The message says which value is accepted, and what to
            do instead.
        UnknownNameError: names the unknown argument, the nearest allowed one, and all allowed ones.
    """
    for name, value in arguments.items():
        if name in table and (message := refusal(name, value, table)):
            raise ValueError(message)
    rest = {name: value for name, value in arguments.items() if name not in table}
    for name in rest:
        if name not in allowed:
            raise UnknownNameError(unknown(f"{taker} got an unknown argument", name, allowed))
    return rest


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
