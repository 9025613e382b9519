"""Options of `nanoinfer eval recall`; `bench_offload.py --task recall` shares some of them."""

from __future__ import annotations

from nanoinfer.options.measuring import ENGINE_MODES, add_engine_arguments, add_model_arguments
from nanoinfer.options.parser import Parser

DEFAULTS = dict(mode="resident,offload", depths="0,0.25,0.5,0.75,1", questions=20)
# Options of the engine that take several values here: each engine mode is asked once with each.
HELP_OF_LISTS = {
    "quantization": 'quantise the weights of a checkpoint in 16 or 32 bits while they are read; "none,int8,fp8,int4" '
    "asks each engine mode once with each (none: as the checkpoint is)",
    "head_quantization": 'head and embeddings in 8 bits; "none,int8" asks once with each',
    "kv_cache_dtype": 'as for other commands; "auto,int8,k8v4" asks each engine mode once with each',
}


def add_arguments(parser: Parser) -> None:
    add_model_arguments(parser, "default: recall, the model that comes along", has_shapes=False)
    parser.add_argument("--context", help="tokens, such as 1k,16k; default: 1k to 64k on a GPU, 1k,2k on a CPU")
    parser.add_argument("--mode", help=f"of {', '.join(ENGINE_MODES)} (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--plot", metavar="FILE.png", help="draw accuracy over length and depth")
    add_grid_arguments(parser)
    add_engine_arguments(parser, HELP_OF_LISTS, without=("hf_overrides",))
    parser.set_defaults(**DEFAULTS)


def add_grid_arguments(parser: Parser) -> None:
    """Add the options of the questions, without defaults."""
    parser.add_argument("--depths", help=f"where facts lie (default: {DEFAULTS['depths']})")
    parser.add_argument(
        "--questions", type=int, help=f"in each cell, a multiple of 5 (default: {DEFAULTS['questions']})"
    )
