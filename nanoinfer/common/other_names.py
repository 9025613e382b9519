"""Other names of what exists here: those that are taken, too, and those of vLLM, llama.cpp, Ollama and others, which a
message about an unknown name calls by ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from nanoinfer.common.tables import by_name

Called = TypeVar("Called", bound=Callable)


def takes_also(**spellings: str) -> Callable[[Called], Called]:
    """Let a function take keywords under other names, too: `takes_also(name="other")`.

    A call raises ValueError if it gives one thing under two names.
    """

    def decorate(function: Called) -> Called:
        @functools.wraps(function)
        def call(*args, **kwargs):
            for name, other in spellings.items():
                if other in kwargs and name in kwargs:
                    raise ValueError(f"{other} is another name of {name}: give one of them")
                if other in kwargs:
                    kwargs[name] = kwargs.pop(other)
            return function(*args, **kwargs)

        return call

    return decorate


# What is nearest in meaning, best first: a message names the first that is allowed there.
MEANT: dict[str, tuple[str, ...]] = by_name(
    {
        "c ctx ctx_size n_ctx num_ctx context context_length context_size max_context_len max_input_len "
        "max_input_length max_length max_model_len max_seq_len max_seq_length max_total_tokens": (
            "max_model_len", "context", "input_len",
        ),
        "n n_predict num_predict predict n_gen max_new_tokens max_output_tokens max_completion_tokens": (
            "max_tokens", "output_len",
        ),
        "np parallel n_parallel num_parallel max_batch_size max_concurrent_requests max_running_requests "
        "max_num_seqs": ("max_num_seqs", "batch", "batch_size"),
        "b ub batch_size num_batch ubatch_size chunked_prefill_size max_batch_prefill_tokens": (
            "max_num_batched_tokens",
        ),
        "ngl n_gpu_layers num_gpu_layers gpu_layers num_gpu": ("gpu_memory_limit", "resident_weights_limit"),
        "ncmoe n_cpu_moe cmoe cpu_moe ot override_tensor moe_cache_mib num_experts_on_gpu expert_cache_size": (
            "expert_slots", "gpu_memory_limit",
        ),
        "vram gpu_mem max_gpu_memory gpu_memory": ("gpu_memory_limit",),
        "tp tp_size": ("tensor_parallel_size",),
        "mem_fraction_static": ("gpu_memory_utilization",),
        "ram cpu_memory max_cpu_memory host_memory": ("host_memory_limit",),
        "offload cpu_offload enable_cpu_offload kv_offload nkvo low_vram": ("offload", "enable_cpu_offload"),
        "cache_dtype cache_type cache_type_k cache_type_v ctk ctv kv_cache_type": ("kv_cache_dtype",),
        "load_in_4bit load_in_8bit quant quantize": ("quantization", "to"),
        "o output outfile out_file": ("out", "output_json", "json"),
        "torch_dtype": ("dtype",),
        "dev gpu main_gpu mg": ("device",),
        "fa flash flash_attn flash_attention attn_implementation": ("attention_backend",),
        "override_kv rope_freq_base rope_freq_scale rope_scale yarn_orig_ctx": ("hf_overrides",),
        "cache_prompt cache_reuse disable_radix_cache": ("enable_prefix_caching",),
        "a alias": ("served_model_name",),
        "max_queued_requests max_waiting_requests": ("max_queue",),
        "to timeout": ("body_timeout",),
        "v verbose verbosity lv uvicorn_log_level": ("log_level",),
        "m hf hfr hf_repo hf_file mu model model_path model_name_or_path model_url": ("MODEL",),
        "p input inputs text": ("prompt", "messages", "input_len"),
        "n_prompt": ("input_len",),
        "sys system_prompt": ("system",),
        "temp": ("temperature",),
        "rng_seed random_seed s": ("seed",),
        "min_new_tokens min_length": ("min_tokens",),
        "reasoning_budget thinking_budget": ("thinking_token_budget",),
        "repeat_penalty": ("repetition_penalty",),
        "r reverse_prompt": ("stop",),
    }
)  # fmt: skip

# The same of values: what llama.cpp, Ollama, transformers and others call formats.
VALUES_MEANT: dict[str, tuple[str, ...]] = by_name(
    {
        "q4 q4_0 q4_1 q4_k q4_k_m q4_k_s iq4_nl iq4_xs int4_wo 4bit w4a16 nf4 bnb bitsandbytes q4_0/f16 f16/q4_0": (
            "int4",
        ),
        "q8 q8_0 q8_k int8_wo 8bit w8a16 w8a8 q8_0/f16 f16/q8_0 q4_0/q8_0": ("int8", "fp8"),
        "f8 fp8_e5m2 float8 float8_e4m3fn w8a8_fp8": ("fp8",),
        "f16 fp16 float16": ("float16", "auto"),
        "bf16 bfloat16": ("bfloat16", "auto"),
        "f32 fp32": ("float32",),
    }
)

# Commands of vLLM, llama.cpp and Ollama: what to run here.
COMMANDS: dict[str, str] = by_name(
    {
        "llama-run": 'use nanoinfer chat MODEL, or nanoinfer generate MODEL "text" --chat',
        "cli llama-cli repl": "use nanoinfer chat MODEL",
        "complete completion-cli llama-simple": 'use nanoinfer generate MODEL "text"',
        "server llama-server start vllm api-server openai": "use nanoinfer serve MODEL",
        "pull download": "none is needed: a model is downloaded when it is first used, by nanoinfer chat MODEL as by "
        "any command; hf download ORG/NAME does it before",
        "ps": "none is needed: GET /v1/models names the model of a server",
        "show info": "use nanoinfer plan MODEL, or nanoinfer inspect FILE for a GGUF file",
        "stop unload kill": "none is needed: a model is loaded as long as its command runs, which Ctrl-C ends",
        "rm delete remove": "delete its files: hf cache ls, then hf cache rm model/ORG/NAME; of Ollama, ollama rm NAME",
        "push cp copy upload": "a model is a directory or a file: copy it, or hf upload ORG/NAME DIR",
        "create modelfile": "there is no Modelfile: give the options, and the system's message in the request; "
        "nanoinfer quantize writes a checkpoint in fewer bits",
        "convert quantise llama-quantize": "use nanoinfer quantize MODEL --to int4 --out DIR",
        "run-batch batch": "use examples/batch.py",
        "update upgrade": "in the clone, git pull && make",
        "benchmark llama-bench perf": "use nanoinfer bench latency, or nanoinfer bench throughput",
        "llama-perplexity perplexity": "use tools/perplexity.py",
        "collect-env env check": "use nanoinfer doctor",
        "fit fit-params llama-fit-params memory estimate": "use nanoinfer plan MODEL",
    }
)

# Paths of other servers, and beginnings of a path that were forgotten: where that is here.
PATHS: dict[str, str] = by_name(
    {
        "/api/chat /chat /v1/chat /chat/completions /v1/engines "
        "/v1/chat/completions/render /inference/v1/generate": "/v1/chat/completions",
        "/responses /v1/response": "/v1/responses",
        "/messages /v1/message /anthropic/v1/messages": "/v1/messages",
        "/api/generate /generate /generate_stream /completion /completions /infill /v1/complete /v1/generate "
        "/api/v1/generate": "/v1/completions",
        "/api/tags /api/ps /api/show /models /v1/model /v1/model/list /api/v1/model /v1/internal/model/info "
        "/get_model_info /model_info": "/v1/models",
        "/props /slots /healthz /livez /readyz /v1/health /health_generate /server_info /get_server_info": "/health",
        "/api/version /api/v0/version": "/version",
        "/apply-template /extras/tokenize /v1/tokenize /v1/internal/encode /api/extra/tokencount": "/tokenize",
        "/v1/detokenize /v1/internal/decode": "/detokenize",
        "/ /redoc /openapi.json /swagger /help /v1": "/docs",
    }
)

# Paths of other servers for which there is none here: why.
NO_PATHS: dict[str, str] = by_name(
    {
        "/v1/embeddings /embeddings /embedding /api/embed /api/embeddings /embed /v1/rerank /v2/rerank /rerank "
        "/reranking /v1/score /score /classify /pooling /v1/classify /v1/moderations": "models here generate text: "
        "start a server with a model of that kind beside this one",
        "/v1/audio/transcriptions /v1/audio/translations /v1/audio/speech /v1/images/generations /v1/images/edits "
        "/v1/realtime": "models here read and write text only",
        "/api/pull /api/push /api/create /api/delete /api/copy /v1/load_lora_adapter /v1/unload_lora_adapter "
        "/models/load /models/unload": "the server has the model that it was started with, and no other",
        "/v1/files /v1/batches /v1/assistants /v1/threads /v1/vector_stores /v1/conversations "
        "/v1/fine_tuning/jobs": "the server keeps nothing between requests",
        "/lora-adapters": "merge the adapter into the weights",
    }
)

# Options that ask for nothing that could be given here: what to do instead.
INSTEAD: dict[str, str] = by_name(
    {
        "t tb threads threads_batch num_thread threads_http cpu_mask cpu_strict numa prio poll": "torch chooses the "
        "threads; the environment variable OMP_NUM_THREADS bounds them",
        "mlock use_mlock": "what lies in host memory is pinned where the system allows it: leave it out, or give "
        "--pin-host-memory require",
        "mmap use_mmap": "files are read, and not mapped: leave it out",
        "keep_alive keepalive sleep_idle_seconds": "the model stays loaded until the process ends: leave it out",
        "warmup": "the engine warms up by itself: leave it out",
        "prompt_cache prompt_cache_all prompt_cache_ro slot_save_path": "the prefix cache lies in memory and ends with "
        "the process, so there is no file: leave it out",
        "check_tensors repack direct_io kv_unified swa_full ctx_checkpoints cache_ram defrag_thold op_offload perf "
        "enable_reasoning headless api_server_count disable_frontend_multiprocessing color e escape special simple_io "
        "multiline_input wordwrap nowordwrap insecure fit props response_role enable_prompt_tokens_details "
        "chat_template_content_format": "there is nothing to choose: leave it out",
        "samplers sampling_seq mirostat mirostat_lr mirostat_ent xtc_probability xtc_threshold typical typical_p "
        "dry_multiplier dynatemp_range top_n_sigma": "there is no such sampler: give temperature, top_p, top_k or "
        "min_p",
        "kv_transfer_config": "KV that does not fit on the GPU streams from host memory by itself: leave it out",
        "repeat_last_n": "penalties count the whole prompt and output: leave it out",
        "offline": "set the environment variable HF_HUB_OFFLINE=1",
        "list_devices": "nanoinfer doctor says what this machine has",
        "webui ui webui_config path": "the server has a page of its own at /, which --no-page leaves out, and "
        "others such as Open WebUI are its clients",
        "slots": "/metrics says what runs and waits: leave it out",
        "models_dir models_max models_preset": "a server has one model: nanoinfer serve MODEL",
        "middleware root_path uds": "put a proxy that does it before the server",
        "config": "give its settings as options",
        "cb cont_batching": "requests are always batched as they come: leave it out",
        "context_shift keep num_keep": "a context that is full ends: give a larger --max-model-len",
        "ts tensor_split sm split_mode pp rpc": "give --tensor-parallel-size: each GPU has an equal share",
        "dp": "give --tensor-parallel-size for one engine on several GPUs, --ray --replicas for several servers",
        "lora lora_scaled lora_modules": "merge the adapter into the weights",
        "md model_draft draft draft_max spec_type": "no second model drafts: --speculative-config "
        '\'{"method": "suffix"}\' guesses from the text itself',
        "ngl n_gpu_layers num_gpu_layers gpu_layers num_gpu": "what does not fit on the GPU streams to it by itself: "
        "leave it out; --gpu-memory-limit bounds what is taken, --resident-weights-limit the weights that stay",
        "ncmoe n_cpu_moe cmoe cpu_moe ot override_tensor": "experts that do not fit on the GPU stream to it by "
        "themselves: leave it out; --expert-slots says how many of each layer may stay",
        "fa flash flash_attn flash_attention": "attention never holds all scores at once: leave it out; "
        "--attention-backend names another kernel",
        "image mm mmproj": "models here read text only: leave it out",
        "grammar grammar_file json_schema json_schema_file jf j format": "a request to nanoinfer serve may have "
        "response_format, and SamplingParams structured_outputs",
        "jinja": "templates are always in Jinja: leave it out",
        "cnv conversation i interactive": "nanoinfer chat MODEL is a conversation",
        "f file prompt_file input_file bf binary_file": "pipe the file into the command: < FILE",
        "sysf system_prompt_file": 'give its text: --system "$(cat FILE)"',
        "log_file": "the log goes to stderr: redirect it, 2> FILE",
        "hft hf_token": "set the environment variable HF_TOKEN",
        "metrics": "/metrics is always there: leave it out",
        "embedding embeddings pooling rerank reranking convert": "models generate text only",
        "ssl_keyfile ssl_certfile ssl_key_file ssl_cert_file": "put a proxy that has them before the server",
        "enable_auto_tool_choice": "requests may always have tools: leave it out",
    }
)

# Environment variables of others that a server does not read: the options that say it.
ENVIRONMENT: dict[str, str] = by_name(
    {
        "OLLAMA_HOST LLAMA_ARG_HOST LLAMA_ARG_PORT": "--host and --port",
        "OLLAMA_CONTEXT_LENGTH LLAMA_ARG_CTX_SIZE": "--max-model-len",
        "OLLAMA_KV_CACHE_TYPE LLAMA_ARG_CACHE_TYPE_K LLAMA_ARG_CACHE_TYPE_V": "--kv-cache-dtype",
        "OLLAMA_NUM_PARALLEL LLAMA_ARG_N_PARALLEL": "--max-num-seqs",
        "OLLAMA_MAX_QUEUE": "--max-queue",
        "OLLAMA_ORIGINS": "--allowed-origins",
        "VLLM_API_KEY LLAMA_API_KEY": "--api-key",
        "VLLM_ATTENTION_BACKEND": "--attention-backend",
    }
)
