"""What is imported when: a command's options without torch, a public name with what it needs, an unknown name never."""

import ast
import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import nanoinfer
from nanoinfer import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
# Prints, as JSON, the packages that came since the start and belong neither to Python nor to us.
FOREIGN = """
import json, sys
before = set(sys.modules)
{code}
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
print(json.dumps(sorted(new - set(sys.stdlib_module_names) - {{"nanoinfer"}})))
"""
EVERY_COMMAND = """
import argparse, contextlib, io
from nanoinfer.commands import main as cli

def commands(parser):
    yield []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from ([name, *rest] for rest in commands(child))

found = list(commands(cli.make_parser()))
assert ["bench", "throughput"] in found and ["generate"] in found
calls = [[*command, option] for command in found for option in ("--help", "--hlep")]
for call in [*calls, ["--version"], ["plam"], ["bench", "troughput"], ["eval"]]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            cli.main(call)
        except SystemExit:
            continue
    raise AssertionError(f"{call} ran")
"""


def run(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def printed(code):
    process = run("-c", code)
    assert process.returncode == 0, process.stderr
    # nanobind lists what lives on when the interpreter ends: nothing may be kept from its collector.
    assert "leaked" not in process.stderr
    return json.loads(process.stdout)


def test_help_version_and_misspelt_options_of_every_command_import_no_other_package():
    assert printed(FOREIGN.format(code=EVERY_COMMAND)) == []


WRONG_VALUES = """
import contextlib, io
from nanoinfer.commands import main as cli

for command in (["generate", "m", "text"], ["chat", "m"], ["serve", "m"], ["plan", "m"], ["verify", "m"]):
    for option, value, said in (
        ("--quantization", "q4", "--quantization 'q4' is not known (did you mean 'int4'?): give one of int4, int4-s"),
        ("--kv-cache-dtype", "q8", "--kv-cache-dtype 'q8' is not one of auto, bfloat16, float16, fp8, int8, "),
        ("--gpu-memory-limit", "12", "did you mean \\"12GiB\\"?"),
    ):
        with contextlib.redirect_stderr(io.StringIO()) as heard:
            assert cli.main([*command, option, value]) == 2
        assert heard.getvalue().startswith("nanoinfer") and said in heard.getvalue(), heard.getvalue()
"""


def test_a_value_that_no_engine_takes_is_refused_before_anything_is_imported():
    assert printed(FOREIGN.format(code=WRONG_VALUES)) == []


def test_the_package_and_its_settings_import_no_other_package():
    code = "import nanoinfer.verify\nfrom nanoinfer import EngineConfig, RequestOutput, SamplingParams\ndir(nanoinfer)"
    assert printed(FOREIGN.format(code=code)) == []


PLAN = """
import contextlib, io, json, sys
import nanoinfer, triton
from nanoinfer.commands.main import main

assert nanoinfer.plan("qwen3-8b", gpu="RTX 4090", host_memory_limit="64GiB", max_model_len=8192).fits
for name in ("gpt-oss-20b", "gemma3-12b"):
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["plan", name, "--gpu", "RTX 4070", "--host-memory-limit", "64GiB"]) == 0
from transformers.utils import auto_docstring, import_utils

assert import_utils.create_import_structure_from_path.cache_info().hits  # its files were looked through once
config = sys.modules["transformers.models.qwen3.configuration_qwen3"].Qwen3Config
assert config(hidden_size=64).hidden_size == 64 and sys.modules[auto_docstring.__module__].auto_class_docstring.__doc__
unwanted = "transformers.generation.utils", "torch._dynamo", "sympy"
print(json.dumps([name for name in unwanted if name in sys.modules]))
"""


def test_a_plan_imports_nothing_that_generates_text_and_no_algebra():
    """transformers imports the first for the docstring of a config's class: more than everything else of a plan takes.
    torch imports sympy for some operations on the meta device, and transformers for configs of its models."""
    assert printed(PLAN) == []


def names_for_type_checkers(package):
    """Public name -> module, from the imports under TYPE_CHECKING."""
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    return {alias.name: statement.module for statement in block.body for alias in statement.names}


@pytest.mark.parametrize("package", ["nanoinfer", "nanoinfer.verify"])
def test_public_names_are_the_same_to_python_to_star_and_to_type_checkers(package):
    module = importlib.import_module(package)
    homes = names_for_type_checkers(module)
    assert sorted(homes) == sorted(module.__all__) and set(homes) <= set(dir(module))
    for name, home in homes.items():
        module.__dict__.pop(name, None)  # as if nobody had asked before
        wanted = getattr(importlib.import_module(home), name)
        assert getattr(module, name) is wanted and module.__dict__[name] is wanted
    star = {}
    exec(f"from {package} import *", star)
    assert set(star) - {"__builtins__"} == set(homes)


def test_submodules_are_found_as_attributes():
    process = run("-c", "import nanoinfer; print(nanoinfer.outputs.RequestOutput.__name__)")
    assert process.stdout == "RequestOutput\n", process.stderr


def test_an_unknown_name_is_an_attribute_error_and_python_names_the_nearest():
    process = run("-c", "import nanoinfer; nanoinfer.EngineConfg")
    said = process.stderr.strip().splitlines()[-1]
    assert said.startswith("AttributeError: module 'nanoinfer' has no attribute 'EngineConfg'")
    assert said.endswith("Did you mean: 'EngineConfig'?")
    for name in ("nonsense", "__wrapped__", "_private", ""):
        assert not hasattr(nanoinfer, name)
    with pytest.raises(ImportError, match="cannot import name 'nonsense' from 'nanoinfer'"):
        exec("from nanoinfer import nonsense")


def test_a_pickle_is_read_where_nothing_was_imported():
    code = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])))"
    params = SamplingParams(max_tokens=7, seed=3)
    process = run("-c", code, pickle.dumps(params).hex())
    assert process.stdout == f"{params}\n", process.stderr
    for name in nanoinfer.__all__:
        assert pickle.loads(pickle.dumps(getattr(nanoinfer, name))) is getattr(nanoinfer, name)
