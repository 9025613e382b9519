"""Who may import whom: folders lie in layers, imports go down, and no two folders or files import each other."""

import ast
import itertools
import re
import sys
import tomllib

import pytest
from arrows import MODULES, ROOT, imports, names_imported

# From the ground up. Files at the root of the package count singly.
LAYERS = (
    "offload offload.blocks offload.engine offload.free_blocks offload.groups offload.host_blocks offload.layout "
    "offload.lifetimes offload.memory offload.plan offload.reserve offload.ring offload.runtime",
    "nanoinfer.common",
    "nanoinfer.devices",
    "nanoinfer.structured_outputs",
    "nanoinfer.outputs nanoinfer.sampling_params nanoinfer.config",
    "nanoinfer.structured",
    "nanoinfer.sampling nanoinfer.gguf nanoinfer.parsers",
    "nanoinfer.requests",
    "nanoinfer.kernels",
    "nanoinfer.attention nanoinfer.layers",
    "nanoinfer.models",
    "nanoinfer.options nanoinfer.weights",
    "nanoinfer.step",
    "nanoinfer.kv",
    "nanoinfer.execution",
    "nanoinfer.parallel",
    "nanoinfer.memory",
    "nanoinfer.engine",
    "nanoinfer.llm",
    "nanoinfer.measure",
    "nanoinfer.bench nanoinfer.chat nanoinfer.recall nanoinfer.serve nanoinfer.verify",
    "nanoinfer.commands",
    "nanoinfer nanoinfer.__main__",
)
HEIGHTS = {room: height for height, rooms in enumerate(LAYERS) for room in rooms.split()}
LIBRARIES = ("bench", "chat", "recall", "serve", "verify")


def room_of(module: str) -> str:
    """The folder below a package, or the file at its root."""
    return ".".join(module.split(".")[:2])


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """A path for each circle found by a walk that enters every node once."""
    done, found = set(), []

    def enter(node: str, path: list[str]) -> None:
        if node in path:
            found.append([*path[path.index(node) :], node])
        elif node not in done:
            for other in sorted(graph.get(node, ())):
                enter(other, [*path, node])
            done.add(node)

    for node in sorted(graph):
        enter(node, [])
    return found


def test_no_two_files_import_each_other_in_a_circle():
    # A package's `__init__` hands names on, to users: it is above all that it names.
    assert not circles({module: others for module, others in imports().items() if module != "nanoinfer"})


def test_imports_go_down():
    unknown = {room_of(module) for module in MODULES} - HEIGHTS.keys()
    assert not unknown, "say in LAYERS how high they lie"
    wrong = [
        f"{module} -> {other}"
        for module, others in imports().items()
        for other in others
        if room_of(other) != room_of(module)
        and HEIGHTS[room_of(other)] >= HEIGHTS[room_of(module)]
        and not (room_of(module).startswith("offload") and room_of(other).startswith("offload"))
    ]
    assert not wrong


def test_offload_knows_nothing_of_a_model():
    assert not [
        module
        for module in MODULES
        if module.startswith("offload")
        for other in imports()[module]
        if other.startswith("nanoinfer")
    ]


def test_execution_knows_steps_and_no_sequence():
    """What plans a step and what carries it out could run in two processes."""
    above = ("nanoinfer.engine", "nanoinfer.kv", "nanoinfer.requests")
    found = {other for module in MODULES if module.startswith("nanoinfer.execution") for other in imports()[module]}
    assert "nanoinfer.step.plan" in found and not [other for other in found if other.startswith(above)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_library_imports_another(library):
    others = tuple(f"nanoinfer.{other}" for other in LIBRARIES if other != library)
    inside = [module for module in MODULES if module.startswith(f"nanoinfer.{library}")]
    assert inside and not [f"{m} -> {other}" for m in inside for other in imports()[m] if other.startswith(others)]


def test_the_checks_find_what_they_look_for():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c", "a"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    tree = ast.parse("def f():\n    from nanoinfer.serve import app\n    import_module('nanoinfer.bench.hf')\n")
    assert {"nanoinfer.serve.app", "nanoinfer.bench.hf"} <= names_imported(tree)


def test_no_test_module_imports_another():
    modules = {path.stem for path in (ROOT / "tests").rglob("test_*.py")}
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        if any(module in text for module in modules):  # most files name none: no need to parse them
            assert not names_imported(ast.parse(text)) & modules, path


def test_tests_mirror_the_folders():
    others = {"tests", "gpu", "offload", "tools", "examples", "fleet", "page"}
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")} - others
    assert folders <= {path.name for path in (ROOT / "nanoinfer").iterdir()}


def test_the_root_is_what_users_import():
    assert {path.stem for path in (ROOT / "nanoinfer").glob("*.py")} == {
        "__init__", "__main__", "config", "llm", "outputs", "sampling_params", "structured_outputs"
    }  # fmt: skip


def test_every_package_that_is_imported_is_asked_for():
    """One that another brings along may be gone with it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: asked for name, asked in project["optional-dependencies"].items() if name != "test"}
    asked = {re.match(r"[\w-]+", one)[0] for one in itertools.chain(project["dependencies"], *extras.values())}
    modules = {name.lower().replace("-", "_").removesuffix("_py") for name in asked}
    found = {name.split(".")[0] for path in MODULES.values() for name in names_imported(ast.parse(path.read_text()))}
    assert "starlette" in found and sorted(found - sys.stdlib_module_names - {"nanoinfer", "offload"} - modules) == []
