"""docs/coming-from.md: names of ours in it exist, and say what the messages say."""

import argparse
import importlib.util
import re
from dataclasses import fields
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from nanoinfer import LLM, AsyncLLM, EngineConfig, LLMEngine, SamplingParams
from nanoinfer.commands.main import make_parser
from nanoinfer.common.other_names import INSTEAD, MEANT
from nanoinfer.serve.app import AppSettings, create_app

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docs" / "coming-from.md").read_text()
# Of libraries that nanoinfer uses.
ENVIRONMENT = {"HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}


def rows() -> list[tuple[list[str], list[str]]]:
    """Of each row with three columns: the names elsewhere, and those here."""
    found = re.findall(r"^\| (.+?) \| (.+?) \| .*\|$", TEXT, re.MULTILINE)
    return [(names(left), names(right)) for left, right in found]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell) + (["MODEL"] if cell == "MODEL" else [])


def commands(parser=None) -> dict[str, set[str]]:
    """Each command with its options."""
    found = {}
    for action in (parser or make_parser())._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                below = commands(command)
                found |= {f"{name} {one}": options for one, options in below.items()}
                found[name] = set(command.known)
    return found


def plain(name: str) -> str:
    name = name.lstrip("-").replace("-", "_")
    return "enable_cpu_offload" if name == "offload" else name


@pytest.fixture(scope="module")
def exists():
    """Whether there is an option, argument, attribute, command, path or file of this name."""
    options = set().union(*commands().values())
    arguments = {field.name for cls in (EngineConfig, SamplingParams) for field in fields(cls)}
    arguments |= {name for method in (LLM.chat, LLM.generate) for name in method.__annotations__}
    engine = MagicMock()
    engine.prompts.tokenizer = None
    paths = {route.path for route in create_app(engine, AppSettings(served_model_names=["m"])).routes}

    def check(name: str) -> bool:
        if name.startswith("nanoinfer "):
            words = name.split()[1:]
            return words[0] in commands() or " ".join(words[:2]) in commands()
        if match := re.fullmatch(r"(GET|POST) (/.*)", name):
            return match[2] in paths
        if match := re.fullmatch(r"(llm|LLM|AsyncLLM|llm\.engine)\.(\w+)", name):
            return hasattr({"AsyncLLM": AsyncLLM, "llm.engine": LLMEngine}.get(match[1], LLM), match[2])
        if name.startswith("tools/"):
            return (ROOT / name).is_file()
        return name in options or name in arguments or name in ENVIRONMENT or name == "MODEL"

    return check


def test_every_name_of_ours_exists(exists):
    assert len(rows()) > 50
    assert [name for _, ours in rows() for name in ours if not exists(name)] == []
    new = re.search(r"New here: (.*?)\n\n", TEXT, re.DOTALL)[1]
    assert [name for name in names(new) if not exists(name)] == []
    assert not exists("--gpu-layers") and not exists("nanoinfer pull") and not exists("llm.engine.abort_request")


def test_a_name_that_messages_understand_means_the_same_in_the_tables():
    known = [(name, ours) for theirs, ours in rows() for name in theirs if plain(name) in MEANT and ours]
    assert len(known) > 20
    # A name that is ours as well, such as `max_num_batched_tokens`, needs no message.
    wrong = [
        (name, ours) for name, ours in known if not {*map(plain, ours)} & {*map(plain, MEANT[plain(name)]), plain(name)}
    ]
    assert wrong == []


def test_nothing_is_said_not_to_be_there_that_messages_lead_to(exists):
    """Of each row that says "none": the message about the name leads to nothing of ours either, and says as much."""
    none = [(names(left), said) for left, said in re.findall(r"^\| (.+?) \| none \| (.*) \|$", TEXT, re.MULTILINE)]
    assert len(none) >= 5
    for theirs, said in none:
        for name in map(plain, theirs):
            assert name not in MEANT, name
            led_to = {word.strip(":,") for word in INSTEAD.get(name.removeprefix("no_"), "").split()}
            assert [word for word in led_to if exists(word) and "_" in word or word == "response_format"] == [], name
            assert "Weights lie on the GPU" not in said
    for wrong in ("Weights stay on the GPU", "must fit there", "All layers lie on the GPU", "ask again where it does"):
        assert wrong not in TEXT


def test_the_lists_are_what_the_messages_say():
    spec = importlib.util.spec_from_file_location("other_names", ROOT / "tools" / "other_names.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert set(re.findall("<!-- names: (.*) -->", TEXT)) == set(tool.PARTS)
    assert tool.fill_in(TEXT) == TEXT, "run python tools/other_names.py"
