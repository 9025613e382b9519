"""The settings of an engine. Values that the engine derives from them go into a plan, never back into the config."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanoinfer.common.errors import did_you_mean
from nanoinfer.common.kv_formats import KV_FORMATS, OTHER_NAMES
from nanoinfer.common.speculation import checked_speculation
from nanoinfer.common.units import is_share, parse_bytes, parse_count, parse_memory
from nanoinfer.common.unsupported import ENGINE, check_keywords

if TYPE_CHECKING:  # it imports torch
    from nanoinfer.devices.base import Device

QUANTISED = ("int4", "int4-symmetric", "int8", "fp8")
"""What the weights of a wide checkpoint can be quantised to."""
_BACKENDS = ("auto", "triton", "torch", "flash_attn")
_CHOICES = dict(
    dtype=("auto", "bfloat16", "float16", "float32", "half", "float"),
    kv_cache_dtype=KV_FORMATS,
    generation_config=("auto", "vllm"),
    load_format=("auto", "dummy"),
    pin_host_memory=("auto", "require"),
)
METHODS = (
    "awq", "gptq", "auto-round", "compressed-tensors", "fp8", "modelopt", "mxfp4", "gguf",
    "compressed_tensors", "finegrained_fp8", "deepseek_fp8", "modelopt_fp4", "modelopt_fp8", "nvfp4", "awq_marlin",
    "gptq_marlin", "gptqmodel", "marlin", "auto_round", "intel/auto-round", "inc",
)  # fmt: skip
"""How a checkpoint may have been quantised; from the second line on what users of vLLM call it besides."""


@partial(check_keywords, table=ENGINE, taker="LLM")
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Names and meanings follow vLLM where vLLM has the same setting.

    Each field is an option of the commands: its line below is the help, and its annotation says how words are read
    (`options/engine.py`).

    Raises:
        UnknownNameError: an argument does not exist; the message names the nearest one.
        ValueError: a value is not allowed, or an argument of vLLM asks for a feature that this engine does not have.

    Attributes:
        model: local directory of a Hugging Face checkpoint, or a hub id.
        tokenizer: directory or hub id of the tokenizer. None: the model's.
        skip_tokenizer_init: True works on token ids only.
        chat_template: file with a chat template in Jinja, for a model without one, or in place of its own.
        hf_overrides: what takes the place of fields of the checkpoint's config.json, by name, such as
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}; an
            object is laid over the one that is there. None: nothing.
        dtype: "auto" (the checkpoint's), "bfloat16", "float16" (or "half") or "float32" (or "float"); in Python also
            torch's own, such as torch.float32.
        quantization: "fp8", "int8" or "int4" quantise the weights of a checkpoint in 16 or 32 bits while they are
            read, but for head and embeddings (the last and the first matrix); "int4-symmetric" without zero points, for
            3% fewer bytes than "int4" and a larger error. Of a quantised checkpoint: how it is quantised, such as
            "awq"; another one is refused. None: as its config says.
        head_quantization: "int8" quantises head and embeddings, if they have 16 or 32 bits, while they are read: 8
            bits, a scale for each token. None: as in the checkpoint.
        kv_cache_dtype: of the KV cache, and so of what it takes of memory and link: "auto" (the model's dtype), "int8"
            (half of 16 bits), "k8v4" (two fifths: keys in 8 bits, values in 4) or "int4" (less than three tenths), with
            scales for each head or 32 numbers of it; or "fp8" ("fp8_e4m3", scale 1; half), which on CUDA needs compute
            capability 8.9. Small models lose much with 4 bits. "bfloat16" and "float16" are plain numbers, also where
            "auto" keeps one vector for key and value (Gemma 4).
        generation_config: where the defaults of omitted sampling parameters come from. "auto": the checkpoint's
            generation_config.json; "vllm": SamplingParams.
        device: "auto" (a GPU, if there is one), "cuda", "cuda:1", "cpu", or the name of a device that another package
            brings.
        tensor_parallel_size: how many GPUs of this machine compute together: 1, 2, 4 or 8. Each has a share of weights
            and KV cache, a process and a link of its own; memory limits are those of each GPU, but for
            `host_memory_limit`, which is that of all. 2 give the bits of 1.
        allow_uneven: whether several GPUs may have free memory that differs by more than 2 GiB: the least counts.
        max_model_len: the most tokens of a prompt with its output, such as 32768 or "32k". None: the model's own
            limit, cut to what fits into memory; -1 is the same, as in vLLM.
        max_num_seqs: the most sequences that run at once. None: 256, or 64 if the budget is below 32 GiB.
        state_slots: of a model whose layers keep a state beside attention, how many sequences may have one at a time:
            others wait. None: `max_num_seqs`, or as many as take a sixteenth of the budget, an eighth from 32 GiB on.
        max_num_batched_tokens: the most tokens of one prefill step, which bounds the working memory. None: at most 8192
            on CUDA and 2048 on the CPU, fewer where requests are done sooner with the memory that this leaves.
        gpu_memory_utilization: share of the GPU's memory to use when no limit is given; never more than is free then.
        gpu_memory_limit: GPU memory for all that the engine takes, weights, KV cache and working memory: bytes,
            "12GiB", or a share of the GPU's memory such as 0.5. More than is free when the engine starts is refused.
            None: see `gpu_memory_utilization`.
        resident_kv_limit: in offload mode, bytes of full KV blocks that may stay on the GPU; 0 streams every full
            block. None: what the budget leaves.
        resident_weights_limit: bytes of the layers' weights that may stay on the GPU; the others lie in host memory and
            are streamed in every step, one layer's at a time. A head larger than this is streamed as well, by slices of
            the vocabulary, else it stays beside. 0 streams all that can be. None: those stay with which requests are
            done soonest.
        cpu_offload_gb: at least so many GiB of weights are streamed, as in vLLM; 0: none ever, and a budget that is too
            small for all weights is refused. None: see `resident_weights_limit`.
        expert_slots: of each sparse layer's experts, how many may lie on the GPU at once. All lie in pinned host memory
            then, and those that a row chooses pass to the GPU, unless they are there still. None: all stay, or as many
            as the budget holds.
        num_gpu_blocks_override: upper limit of the KV blocks in the GPU pool, the scratch block included, whatever the
            budget leaves; for tests and experiments.
        host_memory_limit: bytes of host memory for streamed weights and KV blocks: pinned ones where offloading is
            enabled, else those of requests that were preempted. Where it is enabled and resident mode is current,
            preempted requests come on top, with about as many bytes as the GPU pool has at most: within the limit one
            of them could be left without room, and would fail. None: what `max_num_seqs` sequences can need, but at
            most 60 % of the available memory; without offloading, as much as the system gives.
        block_size: tokens per KV block, a multiple of 16. One block is one split of the attention, so a different block
            size changes the rounding of the results. Layers that keep more bytes of a token than others have smaller
            blocks. None: 256, and more where some layers' blocks would have fewer than 64.
        enable_cpu_offload: True starts in offload mode: host memory holds every full KV block, the GPU keeps as many as
            the budget allows and the rest streams through the ring. "auto" starts in resident mode and enters offload
            mode by itself when the GPU pool is full, instead of preempting requests.
        num_ring_slots: number of ring slots, at least 2. None: 4.
        ring_slot_bytes: bytes of one ring slot, at least one layer of a block. None: 32 MiB. With neither, an engine
            that starts in offload mode has 16 of 20 MiB where drafts may come and no step takes longer for it.
        enforce_eager: True disables CUDA graphs.
        cuda_graph_batch_sizes: batch sizes to capture. None: powers of two to 32, then 48, 64, 96 and multiples of 32
            to 256, as far as `max_num_seqs` reaches; "staged": powers of two to 16, multiples of 16 to 256, multiples
            of 256 beyond.
        capture_num_tokens: token counts of prefill steps to capture, like vLLM's `cudagraph_capture_sizes`. A prefill
            step is padded to the next larger count, with graphs or without; a step above the largest count runs
            eagerly. Each count costs start-up time and a graph per layer. None: on CUDA those of 16, 32, 64, 128, 256
            and 512 that are at most `max_num_batched_tokens` (or a quarter of it, if that is None, too, and was cut to
            below 2048 for lack of memory); on the CPU no counts, because padding would cost more than it saves. []: no
            counts.
        attention_backend: "auto", "triton", "torch", "flash_attn", or one that the package of the device brings.
        enable_prefix_caching: keep the KV of prompts, and states beside it, for others that begin alike. None: yes.
        speculative_config: have tokens guessed and computed beside the one that is known, which changes no token: as
            vLLM writes it, {"method": "suffix", "num_speculative_tokens": 8} guesses what came behind the last tokens
            before, in the prompt or the answer. "auto": while KV or weights stream and few sequences run, where room
            for guesses costs no time. None turns them off. Where layers keep a state, each guess takes a slot that no
            sequence has.
        seed: what the seeds of requests that give none are drawn from, and dummy weights.
        load_format: "auto" (safetensors) or "dummy" (random weights from the config alone).
        pin_host_memory: what to do if the system refuses to pin host memory. "auto": use pageable memory and report its
            speed; "require": work with what was pinned before, or raise an error if nothing was.
        progress_bar: show progress while loading, pinning and capturing.
    """

    model: str | Path
    tokenizer: str | Path | None = None
    skip_tokenizer_init: bool = False
    chat_template: str | Path | None = None
    hf_overrides: dict | None = None
    dtype: str = "auto"
    quantization: str | None = None
    head_quantization: str | None = None
    kv_cache_dtype: str = "auto"
    generation_config: str = "auto"
    device: str = "auto"
    tensor_parallel_size: int = 1
    allow_uneven: bool = False
    max_model_len: int | str | None = None
    max_num_seqs: int | None = None
    state_slots: int | None = None
    max_num_batched_tokens: int | str | None = None
    gpu_memory_utilization: float = 0.9
    gpu_memory_limit: int | float | str | None = None
    resident_kv_limit: int | str | None = None
    resident_weights_limit: int | str | None = None
    cpu_offload_gb: float | None = None
    expert_slots: int | None = None
    num_gpu_blocks_override: int | None = None
    host_memory_limit: int | str | None = None
    block_size: int | None = None
    enable_cpu_offload: bool | str = False
    num_ring_slots: int | None = None
    ring_slot_bytes: int | str | None = None
    enforce_eager: bool = False
    cuda_graph_batch_sizes: list[int] | str | None = None
    capture_num_tokens: list[int] | None = None
    attention_backend: str = "auto"
    enable_prefix_caching: bool | None = None
    speculative_config: dict | str | None = "auto"
    seed: int = 0
    load_format: str = "auto"
    pin_host_memory: str = "auto"
    progress_bar: bool = True

    def __post_init__(self) -> None:
        self._take_other_words()
        self._check_choices()
        self._check_values()
        self._parse_sizes()
        self._check_together()

    def _take_other_words(self) -> None:
        """Take other names of the same: torch.float32 in Python, and vLLM's words."""
        if type(self.dtype).__name__ == "dtype":
            object.__setattr__(self, "dtype", str(self.dtype).removeprefix("torch."))
        given = self.kv_cache_dtype
        if isinstance(given, str) and (name := OTHER_NAMES.get(given)) is not None:
            if name not in ("auto", "fp8"):
                warnings.warn(
                    f"kv_cache_dtype={given!r} is taken as {name!r}: as many bits, in a layout of our own",
                    stacklevel=5,
                )
            object.__setattr__(self, "kv_cache_dtype", name)
        for name in ("max_model_len", "max_num_batched_tokens"):
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, parse_count(text, name))
        if self.max_model_len == -1:  # what fits
            object.__setattr__(self, "max_model_len", None)

    def _check_choices(self) -> None:
        for name, allowed in _CHOICES.items():
            self._one_of(name, allowed)
        self._check("quantization", isinstance(self.quantization, str | None), 'None or text, such as "int4" or "awq"')
        if self.quantization not in (None, *QUANTISED, *METHODS):
            is_file = re.match("(iq|q|tq)[0-9]_", self.quantization.lower())
            file = "for a GGUF file of that type give org/name-GGUF:TYPE as the model, without this; else " * bool(
                is_file
            )
            raise ValueError(
                f"quantization={self.quantization!r} is not known{did_you_mean(self.quantization, QUANTISED)}: "
                f"{file}give one of {', '.join(QUANTISED)}, or leave it out where the checkpoint is quantised"
            )
        if self.head_quantization is not None:
            self._one_of("head_quantization", ("int8",))
        if self.attention_backend not in _BACKENDS:
            from nanoinfer.devices.registry import brought_backends  # it imports torch, and few ask for others

            self._one_of("attention_backend", (*_BACKENDS, *brought_backends()))
        offloads = isinstance(self.enable_cpu_offload, bool) or self.enable_cpu_offload == "auto"
        self._check("enable_cpu_offload", offloads, 'True, False or "auto"')
        for name in ("enforce_eager", "skip_tokenizer_init", "allow_uneven"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        is_right = isinstance(self.enable_prefix_caching, bool | None)
        self._check("enable_prefix_caching", is_right, "True, False or None")

    def _check_values(self) -> None:
        is_model = isinstance(self.model, str | Path) and str(self.model)
        self._check("model", is_model, "a checkpoint's directory or a hub id")
        self._check("device", isinstance(self.device, str), 'text: "auto", "cuda", "cuda:1" or "cpu"')
        is_path = isinstance(self.chat_template, str | Path | None)
        self._check("chat_template", is_path, "the path of a file with a template in Jinja")
        overrides = self.hf_overrides
        is_right = isinstance(overrides, dict | None) and all(isinstance(name, str) for name in overrides or ())
        self._check("hf_overrides", is_right, "None or a dict of the config's fields")
        object.__setattr__(self, "speculative_config", checked_speculation(self.speculative_config))
        counts = "max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"
        counts += "expert_slots", "state_slots"
        for name in counts:
            if getattr(self, name) is not None:
                self._count(name, minimum=1)
        self._count("tensor_parallel_size", minimum=1)
        self._check("tensor_parallel_size", self.tensor_parallel_size in (1, 2, 4, 8), "1, 2, 4 or 8")
        if self.block_size is not None:
            self._count("block_size", minimum=16)
            self._check("block_size", self.block_size % 16 == 0, "a multiple of 16, such as 256")
        if self.num_ring_slots is not None:
            self._count("num_ring_slots", minimum=2, reason=": one slot is filled while another is read")
        self._count("seed", minimum=0)
        gib, share = self.cpu_offload_gb, self.gpu_memory_utilization
        is_right = gib is None or _is_number(gib) and 0 <= gib < 2**20
        self._check("cpu_offload_gb", is_right, "None, or a number of GiB, such as 4")
        is_right = _is_number(share) and 0 < share <= 1
        self._check("gpu_memory_utilization", is_right, "above 0 and at most 1, such as 0.9")
        sizes, counts = self.cuda_graph_batch_sizes, self.capture_num_tokens
        what = "list of whole numbers of at least 1"
        is_right = sizes is None or sizes == "staged" or sizes and _are_counts(sizes)
        self._check("cuda_graph_batch_sizes", is_right, f'None, "staged" or a {what}')
        is_right = counts is None or _are_counts(counts)
        self._check("capture_num_tokens", is_right, f"None, [] for none, or a {what}, such as [16, 64, 256]")

    def _parse_sizes(self) -> None:
        limits = "gpu_memory_limit", "host_memory_limit", "resident_kv_limit", "resident_weights_limit"
        for name in (*limits, "ring_slot_bytes"):
            value = getattr(self, name)
            if value is None or is_share(value) and name == "gpu_memory_limit":
                continue
            parse = parse_memory if name.endswith("memory_limit") else parse_bytes
            is_zero = name.startswith("resident") and value == 0 and not isinstance(value, bool)
            object.__setattr__(self, name, 0 if is_zero else parse(value, name))

    def _check_together(self) -> None:
        limit, gib = self.resident_weights_limit, self.cpu_offload_gb
        if gib == 0 and limit is not None:
            raise ValueError(
                f"resident_weights_limit={limit!r} has weights streamed that are more, and cpu_offload_gb={gib!r} has "
                "none: leave one of them out"
            )
        if self.expert_slots is not None and (limit is not None or gib is not None):
            raise ValueError(
                f"expert_slots={self.expert_slots} brings experts one by one, and resident_weights_limit or "
                "cpu_offload_gb whole layers: leave one of them out"
            )
        counts, most = self.capture_num_tokens, self.max_num_batched_tokens
        if counts and most is not None and max(counts) > most:
            raise ValueError(
                f"capture_num_tokens={counts!r} holds {max(counts)}, and a prefill step has at most "
                f"max_num_batched_tokens={most} tokens: lower the one or raise the other"
            )

    @property
    def may_offload(self) -> bool:
        """Whether the engine may use offload mode at all."""
        return self.enable_cpu_offload in (True, "auto")

    @property
    def pins_at_start(self) -> bool:
        """Whether all host memory is pinned at the start, and not as it is wanted."""
        return self.enable_cpu_offload is True

    @property
    def caches_prefixes(self) -> bool:
        """Whether prompts are found by others that begin alike."""
        return self.enable_prefix_caching is not False

    def graph_batch_sizes(self, max_num_seqs: int, device: Device) -> list[int]:
        """Return the padded decode batch sizes, ascending. Only the last may exceed `max_num_seqs`, to cover it."""
        if isinstance(self.cuda_graph_batch_sizes, list):
            return sorted(set(self.cuda_graph_batch_sizes))
        if self.cuda_graph_batch_sizes is None:
            return device.graph_batch_sizes(max_num_seqs)
        sizes = [size for size in (2**i for i in range(max_num_seqs.bit_length() + 1)) if size < 16]
        sizes += [*range(16, 257, 16), *range(512, max_num_seqs + 256, 256)]
        return [size for i, size in enumerate(sizes) if i == 0 or sizes[i - 1] < max_num_seqs]

    def graph_num_tokens(self, max_num_batched_tokens: int, device: Device) -> list[int]:
        """Return the padded token counts of small prefill steps, ascending, at most `max_num_batched_tokens`."""
        if self.capture_num_tokens is not None:
            return sorted(set(self.capture_num_tokens))
        # If the engine itself has cut steps to below 2048 tokens, memory is short: graphs must take little of it.
        limit = max_num_batched_tokens if self.max_num_batched_tokens is not None else max_num_batched_tokens // 4
        return device.graph_num_tokens(limit)

    def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in tuple(allowed):  # which takes a list, too
            guess = did_you_mean(str(value), allowed)
            raise ValueError(f"{name}={value!r} is not one of {', '.join(allowed)}{guess}")

    def _count(self, name: str, *, minimum: int, reason: str = "") -> None:
        value = getattr(self, name)
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        self._check(name, is_count, f"a whole number of at least {minimum}{reason}")

    def _check(self, name: str, is_right: object, what: str) -> None:
        if not is_right:
            raise ValueError(f"{name}={getattr(self, name)!r} must be {what}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 1 for value in values)
