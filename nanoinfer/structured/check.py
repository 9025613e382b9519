"""A process of its own that compiles grammars for trial: this file is run, not imported.

llguidance compiles in recursion, so a long chain of references overflows the stack and ends the process, and a few
patterns that must all match can take it forever. So each grammar is compiled here first, where both harm nobody.

A line of JSON in: `grammar`, or `gbnf` that is to be made one; `schema`, what it was made of, or null; `special`, the
tokenizer's special tokens; `num_tokens`, how many it has. A line out: `error`, or null; `path`, the part of the schema
that is at fault; `grammar`. The argument says how many seconds of a CPU a grammar may take.
"""

import json
import math
import random
import sys
import threading
import time
from contextlib import suppress
from functools import lru_cache

# Address space is taken, and memory only as far as a grammar is deep.
STACK_BYTES = 512 * 2**20
MAX_BYTES = 4 * 2**30
# A mask of an ambiguous grammar looks at ever more items, each of which takes a microsecond of all rows; those of 163
# schemas that agents send look at fewer than 500.
LIMITS = dict(max_lexer_states=50_000, step_max_items=2_000, verbose_errors=False)
SEARCH_SECONDS = 1.0  # for the part of a schema that is at fault
WALK_BYTES = 64  # of a mask: 512 tokens
WALK_TOKENS = 24  # masks are made with less of a stack than an engine's threads have
MASK_STACK_BYTES = 2**20
# Where a schema has parts by name, and lists of parts.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")


class Bytes:
    """A tokenizer of single bytes, with the special tokens of another one, and as many tokens."""

    bos_token_id = None
    eos_token_id = 256

    def __init__(self, special, num_tokens):
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<end of text>", *(one.encode() for one in special)]
        self.tokens += (b"<no token %d>" % number for number in range(len(self.tokens), num_tokens))
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text):
        return list(text)


def compiled(tokenizer, grammar):
    """Return a matcher. Call it on a large stack."""
    from llguidance import LLMatcher, LLParserLimits

    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))


@lru_cache(maxsize=1)
def tokenizer_with(special, num_tokens):
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(Bytes(special, num_tokens)))


def walk(matcher, random):
    """Go on for some tokens: masks find out more of what is wrong, and a copy is made of each request's matcher."""
    matcher = matcher.deep_copy()
    for _ in range(WALK_TOKENS):
        bits = matcher.compute_bitmask()[:WALK_BYTES]
        allowed = [8 * index + bit for index, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1]
        if not allowed or not matcher.consume_token(random.choice(allowed)) or matcher.is_stopped():
            break
    return matcher.get_error()


def fault(tokenizer, grammar):
    """Return what is wrong with a grammar; "": nothing."""
    matcher = on_stack(STACK_BYTES, lambda: compiled(tokenizer, grammar))
    return matcher.get_error() or on_stack(MASK_STACK_BYTES, lambda: walk(matcher, random.Random(0)))


def on_stack(num_bytes, work):
    """Return what `work` returns or raises, called on a thread with a stack of this size."""
    outcomes = []

    def call():
        try:
            outcomes.append((work(), None))
        except BaseException as error:
            outcomes.append((None, error))

    before = threading.stack_size(num_bytes)
    try:
        thread = threading.Thread(target=call, name="nanoinfer-grammar")
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    result, error = outcomes[0]
    if error is not None:
        raise error
    return result


def path_of(tokenizer, schema, error):
    """Return the smallest part of a schema that gives the same error when it stands alone, as a JSON pointer."""
    from llguidance import LLMatcher

    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    path, end = "#", time.monotonic() + SEARCH_SECONDS
    while True:
        for name, part in parts(schema):
            if time.monotonic() > end:
                return path
            if fault(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(shared | part))) == error:
                path, schema = f"{path}/{name}", part
                break
        else:
            return path


def parts(schema):
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, dict):
            yield from ((f"{name}/{key}", part) for key, part in value.items() if isinstance(part, dict))
        elif name in _LISTS and isinstance(value, list):
            yield from ((f"{name}/{index}", part) for index, part in enumerate(value) if isinstance(part, dict))
        elif isinstance(value, dict):
            yield name, value


def grammar_of_gbnf(text):
    """Return llama.cpp's grammar as llguidance has it, and what is wrong with it, or None."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return LLMatcher.grammar_from_lark(any_to_lark(text)), None
    except (Exception, RecursionError) as error:  # a parser written in Python, with errors of its own
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return None, f"it cannot be read as GBNF: {reason}"


def check(asked):
    tokenizer = tokenizer_with(tuple(asked["special"]), asked["num_tokens"])
    grammar, error = (asked["grammar"], None) if asked["gbnf"] is None else grammar_of_gbnf(asked["gbnf"])
    error = error or fault(tokenizer, grammar) or None
    schema = asked["schema"] if error else None
    path = path_of(tokenizer, schema, error) if isinstance(schema, dict) else None
    return {"error": error, "path": path, "grammar": grammar}


def bound(seconds):
    """End the process when it has taken so many more seconds of a CPU, or too much memory; not on every system."""
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    end = math.ceil(used.ru_utime + used.ru_stime + seconds)
    for name, most in ((resource.RLIMIT_CORE, 0), (resource.RLIMIT_AS, MAX_BYTES), (resource.RLIMIT_CPU, end)):
        with suppress(ValueError, OSError):
            resource.setrlimit(name, (most, resource.getrlimit(name)[1]))


if __name__ == "__main__":
    for line in sys.stdin:
        bound(float(sys.argv[1]))
        print(json.dumps(check(json.loads(line))), flush=True)
