"""A refusal for memory names settings that fit, and each of them does."""

import ast
import re

import pytest

from nanoinfer import LLM
from nanoinfer.models.shapes import write_shape

COMMON = dict(load_format="dummy", device="cpu", skip_tokenizer_init=True, progress_bar=False)


def settings_of(message: str) -> list[dict]:
    lines = re.findall(r"^  - (.*?): ", message, re.MULTILINE)
    return [{word.arg: ast.literal_eval(word.value) for word in ast.parse(f"f({line})").body[0].value.keywords}
            for line in lines]  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        dict(gpu_memory_limit="9MiB", dtype="bfloat16"),
        dict(gpu_memory_limit="24MiB", max_model_len=9000, dtype="bfloat16"),
        dict(gpu_memory_limit="40MiB", max_model_len=20000, enable_cpu_offload=True, host_memory_limit="1MiB"),
    ],
    ids=["weights", "tokens", "host"],
)
def test_what_is_named_fits(given, tmp_path):
    path = write_shape("tiny", tmp_path)
    with pytest.raises(ValueError, match="What would help, cheapest first:") as refused:
        LLM(path, **COMMON | given)
    found = settings_of(str(refused.value))
    assert found
    assert "KV in int8" in str(refused.value) or given.get("max_model_len") != 9000
    first, heading, *listed = str(refused.value).splitlines()
    assert not re.search("give|lower|raise|set ", first) and heading == "What would help, cheapest first:"
    amounts = [re.findall(r'at least "([\d.]+[MG]iB)" of (GPU|host) memory', line) for line in listed]
    found += [{f"{tier.lower()}_memory_limit": size for size, tier in of_line} for of_line in amounts if of_line]
    assert len(found) == len(listed)
    for changes in found:
        LLM(path, **COMMON | given | changes).close()


def test_where_nothing_fits_nothing_is_named(tmp_path):
    with pytest.raises(ValueError, match="is too small") as refused:
        LLM(write_shape("tiny", tmp_path), gpu_memory_limit="1MiB", **COMMON)
    assert "What would help" not in str(refused.value)
