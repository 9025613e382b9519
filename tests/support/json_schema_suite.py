"""The JSON Schema Test Suite's cases, and which of them are refused: tests/structured/json_schema_suite/README.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

DIRECTORY = Path(__file__).resolve().parents[1] / "structured" / "json_schema_suite"
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}


@dataclass(frozen=True)
class Case:
    """A schema with its tests.

    Attributes:
        name: "file: description".
        tests: description, data, whether these are valid.
        refusal: what the error says where the schema is refused; None: it is taken.
    """

    name: str
    schema: Any
    tests: list[tuple[str, Any, bool]]
    refusal: str | None


def cases_of_files() -> dict[str, list[Case]]:
    refused = json.loads((DIRECTORY / "refused.json").read_text())
    refusals = {name: reason for reason, names in refused.items() for name in names}
    files = json.loads((DIRECTORY / "cases.json").read_text())
    assert sum(len(names) for names in refused.values()) == len(refusals)
    assert refusals.keys() <= {f"{file}: {case[0]}" for file, cases in files.items() for case in cases}
    return {
        file: [
            Case(
                name := f"{file}: {description}",
                DRAFT | schema if isinstance(schema, dict) else schema,
                [tuple(test) for test in tests],
                refusals.get(name),
            )
            for description, schema, tests in cases
        ]
        for file, cases in files.items()
    }


def is_valid(text: str, schema: Any) -> bool:
    """Whether a text is JSON that fulfils a schema. Numbers are exact: 0.07 is a multiple of 0.01."""
    schema = json.loads(json.dumps(schema), parse_float=_exact)
    return Draft202012Validator(schema).is_valid(json.loads(text, parse_float=_exact))


def _exact(text: str) -> int | float | Decimal:
    try:
        number = Decimal(text)
    except InvalidOperation:  # its exponent is larger than any
        return float(text)
    is_whole = number.is_finite() and abs(number.adjusted()) < 1000 and number == number.to_integral_value()
    return int(number) if is_whole else number
