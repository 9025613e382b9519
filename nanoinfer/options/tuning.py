"""Engine options that several commands share: their names, and the engine arguments that they become."""

from __future__ import annotations

import argparse

from nanoinfer.config import EngineConfig


def add_arguments(parser: argparse.ArgumentParser, *, enable_prefix_caching: bool | None = None) -> None:
    """Adds the options with the engine's defaults, except that of prefix caching; None: the command decides."""
    defaults = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
    parser.add_argument(
        "--gpu-memory-utilization", type=float, default=defaults["gpu_memory_utilization"], metavar="SHARE",
        help="share of the GPU's memory to use where no limit is given (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--num-ring-slots", type=int, default=defaults["num_ring_slots"])
    parser.add_argument("--ring-slot-bytes", help='bytes of one ring slot, such as "32MiB"')
    parser.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=enable_prefix_caching,
        help="reuse KV blocks of equal prompt beginnings",
    )  # fmt: skip
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--cuda-graph-batch-sizes", type=_batch_sizes, metavar="SIZES",
        help='padded batch sizes of decode graphs, such as 1,2,4,8, or "staged"',
    )  # fmt: skip
    parser.add_argument(
        "--capture-num-tokens", type=_counts, metavar="COUNTS",
        help='token counts of prefill steps that run from graphs, such as 16,64,256, or "none"',
    )  # fmt: skip


def engine_arguments(options: argparse.Namespace) -> dict:
    """Return the values of these options as arguments of an LLM."""
    names = (
        "gpu_memory_utilization num_ring_slots ring_slot_bytes enable_prefix_caching enforce_eager "
        "cuda_graph_batch_sizes capture_num_tokens"
    )
    return {name: getattr(options, name) for name in names.split()}


def _batch_sizes(text: str) -> list[int] | str:
    return text if text == "staged" else _numbers(text, '"staged"')


def _counts(text: str) -> list[int]:
    return [] if text == "none" else _numbers(text, '"none"')


def _numbers(text: str, word: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be whole numbers, such as 16,64,256, or {word}") from None
