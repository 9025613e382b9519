"""Texts that `nanoinfer bench --replay` has a model say: some copy what stands before them, one does not.

python -m nanoinfer.bench.texts FILE writes them, as tokens of SmolLM2's tokenizer, whose ids most shapes have. They
come from this project's documents and from Python's own library, so another version of either gives others: the digest
in a record says which they were.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanoinfer.config import EngineConfig
from nanoinfer.weights.load import read_checkpoint
from nanoinfer.weights.tokenizer_files import load_tokenizer

DOCS = Path(__file__).resolve().parents[2] / "docs"
MOST_FILLER, MOST_ANSWER = 140_000, 1024
"""Tokens that are written: those that stand before a prompt in longer contexts, and those of an answer."""
_OF_CASES = "blocks", "exactness", "sparse"  # pages that no filler holds
_MAKE_ONE = "python -m nanoinfer.bench.texts FILE writes one"


@dataclass(frozen=True)
class Texts:
    """Prompts and what comes behind them, in tokens.

    Attributes:
        filler: stands before a prompt, as much of it as the context has room for.
        cases: by name the end of a prompt, and its answer.
        digest: of the file, in hexadecimal.
    """

    filler: list[int]
    cases: dict[str, tuple[list[int], list[int]]]
    digest: str

    @property
    def num_ids(self) -> int:
        """The least vocabulary that has all tokens."""
        return 1 + max(
            max(part, default=0) for part in (self.filler, *(one for case in self.cases.values() for one in case))
        )

    def of(self, name: str, context: int, output_len: int, vocab_size: int) -> tuple[list[int], list[int]]:
        """Return a prompt of `context` tokens and its answer of up to `output_len`.

        Of a vocabulary that is smaller than the texts' each token is the rest by its size: what was equal stays so.
        """
        prompt, answer = self.cases[name]
        prompt = [*self.filler[: max(0, context - len(prompt))], *prompt[-context:]]
        return [[token % vocab_size for token in part] for part in (prompt, answer[:output_len])]


def read(path: str | Path) -> Texts:
    """Read a file of texts; ValueError says what is wrong with it."""
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"--replay {str(path)!r} cannot be read ({reason}): {_MAKE_ONE}") from error
    try:
        return parsed(content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"--replay {str(path)!r} holds no texts as tokens: {_MAKE_ONE}") from error


def parsed(content: str) -> Texts:
    """Return the texts that a file of this content holds."""
    found = json.loads(content)
    cases = {name: (_tokens(case["prompt"]), _tokens(case["answer"])) for name, case in found["cases"].items()}
    if not all(prompt and len(answer) > 1 for prompt, answer in cases.values()) or not cases:
        raise ValueError("a case is empty")
    return Texts(_tokens(found["filler"]), cases, hashlib.sha256(content.encode()).hexdigest())


def _tokens(given: list[int]) -> list[int]:
    if not all(type(token) is int and token >= 0 for token in given):
        raise ValueError("a token is no number")
    return given


def made() -> str:
    """Return what `read` reads, made anew.

    Raises:
        ValueError: the documents are not here, which lie in a clone alone.
    """
    if not (DOCS / "blocks.md").is_file():
        raise ValueError(f"the texts come from the documents of a clone, and {DOCS} has none: run it in a clone")
    config = EngineConfig(model="smollm2")
    tokenizer = load_tokenizer(config, read_checkpoint("smollm2"))
    filler: list[int] = []
    for text in fillers():
        filler += tokenizer.encode(text)
        if len(filler) >= MOST_FILLER:
            break
    cases = {
        name: dict(prompt=tokenizer.encode(prompt), answer=tokenizer.encode(answer)[:MOST_ANSWER])
        for name, (prompt, answer) in cases_of_text().items()
    }
    return json.dumps(dict(filler=filler[:MOST_FILLER], cases=cases))


def cases_of_text() -> dict[str, tuple[str, str]]:
    """Return ends of prompts, and what is to come behind them, by name."""
    code = inspect.getsource(argparse._get_action_name) + inspect.getsource(argparse.ArgumentParser.parse_known_args)
    code += inspect.getsource(argparse.ArgumentParser._get_values)
    renamed = re.sub(r"\bnamespace\b", "settings", code)
    page, passage, prose = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in _OF_CASES)
    quotes = "".join(f'{number}. As the page says: "{one}"\n' for number, one in enumerate(_sentences(page)[::3], 1))
    passage = "\n".join(_sentences(passage)[:40])
    return {
        "rename": (f"```python\n{code}```\nThe same with `namespace` called `settings`:\n```python\n", renamed),
        "edit": (f"{passage}\n\nThe same, shorter, with cards in place of GPUs:\n\n", _edited(passage)),
        "quotes": (f"{page}\nWhat this page says, in quotes:\n", quotes),
        "prose": ("Write about experts in host memory.\n", prose[len(prose) // 3 :]),
    }


def _sentences(page: str) -> list[str]:
    return [one.strip() for one in re.split(r"(?<=\.)\s", page) if 60 < len(one) < 300]


def _edited(passage: str) -> str:
    """Leave out every fifth sentence, and change a word."""
    kept = [one for number, one in enumerate(passage.split("\n"), 1) if number % 5]
    return re.sub(r"\bGPU\b", "card", "\n".join(kept))


def fillers() -> Iterator[str]:
    """Yield what stands before prompts; none of it is in a case."""
    for page in sorted(DOCS.glob("*.md")):
        if page.stem not in _OF_CASES:
            yield page.read_text(encoding="utf-8")
    for module in (textwrap, ast, json.decoder, json.encoder, hashlib, inspect, re):
        yield inspect.getsource(module)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(made(), encoding="utf-8")
