"""What holds for the sources: one writer for each field of a sequence, few looks at the mode, private names private."""

import ast
import functools
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from nanoinfer.requests.sequence import Sequence

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for package in ("nanoinfer", "offload")
    for path in (ROOT / package).rglob("*.py")
}
SEQUENCE = "nanoinfer/requests/sequence.py"
FIELDS = {field.name for field in fields(Sequence)}
# The file that writes a field after its initial value. Whatever is not named keeps its initial value.
WRITERS = {
    "state": "nanoinfer/engine/scheduler.py",
    "num_tokens": "nanoinfer/engine/planner.py",
    "num_blocks_read": "nanoinfer/engine/planner.py",
    "num_resident_read": "nanoinfer/engine/planner.py",
    "streamed_bytes": "nanoinfer/engine/engine.py",
    "copy_wait_seconds": "nanoinfer/engine/meter.py",
    "fetched_bytes": "nanoinfer/engine/meter.py",
    "row": "nanoinfer/kv/cache.py",
    "state_slot": "nanoinfer/kv/cache.py",
    "draft_slots": "nanoinfer/kv/cache.py",
    "num_computed": "nanoinfer/kv/cache.py",
    "num_cached": "nanoinfer/kv/cache.py",
    "num_promised_host": "nanoinfer/kv/cache.py",
    "kept_blocks": "nanoinfer/kv/mover.py",
    "kept_state": "nanoinfer/kv/mover.py",
    "num_drafted": "nanoinfer/engine/drafts.py",
    "num_accepted": "nanoinfer/engine/drafts.py",
    "snapshot_ends": "nanoinfer/kv/snapshots.py",
    "num_published": "nanoinfer/kv/prefix_cache.py",
    "digests": "nanoinfer/kv/prefix_cache.py",
    "token_ids": "nanoinfer/requests/request.py",
    "logprobs": "nanoinfer/requests/request.py",
    "cumulative_logprob": "nanoinfer/requests/request.py",
    "detokenizer": "nanoinfer/requests/request.py",
    "text_delta": "nanoinfer/requests/request.py",
    "num_streamed": "nanoinfer/requests/request.py",
    "mask": "nanoinfer/engine/masks.py",
    "is_masked_aside": "nanoinfer/engine/masks.py",
    "finish_reason": "nanoinfer/requests/request.py",
    "stop_reason": "nanoinfer/requests/request.py",
}
# Other objects with fields of these names, as the sources call them. Any other name counts as a sequence's.
OTHERS = {
    ("nanoinfer/engine/meter.py", "times"),
    ("nanoinfer/execution/runner.py", "pending"),
    ("nanoinfer/recall/evaluate.py", "scores"),
    ("nanoinfer/verify/report.py", "report"),
    ("offload/engine.py", "counters"),
    ("offload/engine.py", "self.counters"),
}
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"}


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    """Of the whole file: to walk a tree takes longer than to make it."""
    return list(ast.walk(ast.parse(source)))


def is_setter(function: ast.AST) -> bool:
    if isinstance(function, ast.Name):
        return function.id in ("setattr", "delattr")
    is_method = isinstance(function, ast.Attribute) and function.attr == "__setattr__"
    return is_method and ast.unparse(function) == "object.__setattr__"


def written(source: str) -> Iterator[tuple[ast.AST, ast.Attribute]]:
    """Each attribute that is assigned, deleted or changed in place, also under another name, with where."""
    names = {  # in the whole file: a name that ever stands for a field counts as that field
        target.id: node.value
        for node in nodes(source)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            changed = node.func.value
        elif isinstance(node, ast.Call) and is_setter(node.func):
            name = node.args[1]
            changed = ast.Attribute(node.args[0], name.value if isinstance(name, ast.Constant) else ast.unparse(name))
        elif isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            changed = node
            while isinstance(changed, ast.Subscript):
                changed = changed.value
            if isinstance(node, ast.Name):
                continue
        else:
            continue
        if isinstance(changed, ast.Name):
            changed = names.get(changed.id)
        if isinstance(changed, ast.Attribute):
            yield node, changed


def writers_of_sequences(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which files write each field of a sequence, initial values apart."""
    found = defaultdict(set)
    for path, source in sources.items():
        methods = [node for node in nodes(source) if isinstance(node, ast.FunctionDef)] if path == SEQUENCE else []
        initial = {id(node) for method in methods if method.name == "__post_init__" for node in ast.walk(method)}
        for node, attribute in written(source):
            if attribute.attr not in FIELDS or id(node) in initial:
                continue
            owner = ast.unparse(attribute.value)
            is_other = owner == "self" and path != SEQUENCE or (path, owner) in OTHERS
            if not is_other:
                found[attribute.attr].add(path)
    return found


def test_each_field_of_a_sequence_has_one_writer():
    assert writers_of_sequences(SOURCES) == {name: {path} for name, path in WRITERS.items()}


def test_a_second_writer_is_found():
    lines = (
        "victim.row = None", "victim.row, other = 1, 2", "victim.row += 1", "victim.row: int = 2", "del victim.row",
        "for victim.row in x: pass", "with x as victim.row: pass", "setattr(victim, 'row', 1)", "victim.row[2:3] = []",
        "victim.row.append(1)", "a = victim.row\na.clear()",
    )  # fmt: skip
    for line in lines:
        assert writers_of_sequences({"nanoinfer/kv/mover.py": line}) == {"row": {"nanoinfer/kv/mover.py"}}, line
    assert not writers_of_sequences(
        {"nanoinfer/kv/mover.py": "row = victim.row\nself.row = row.append\nx[victim.row] = 1"}
    )
    method = "class Sequence:\n    def __post_init__(self):\n        self.row = 1\n"
    assert not writers_of_sequences({SEQUENCE: method})
    assert writers_of_sequences({SEQUENCE: method + "    def leave(self):\n        self.row = 1\n"}) == {
        "row": {SEQUENCE}
    }


# What says which mode is current, or was asked for. `may_offload` is not of them: it says what can ever come.
MODE_NAMES = {"is_offload", "is_resident", "may_stream", "enable_cpu_offload"}
ROOMS = ("models", "layers", "kernels", "execution", "kv")
MAY_LOOK = {"nanoinfer/kv/admission.py", "nanoinfer/kv/mover.py", "nanoinfer/kv/switch.py"}


def reads_of_the_mode(source: str) -> list[str]:
    """The names and attributes that are read and say the mode, and comparisons with a mode's name."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            name = node.id if isinstance(node, ast.Name) else node.attr
            found += [ast.unparse(node)] * (name in MODE_NAMES)
        elif isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
            is_mode = any(isinstance(part, ast.Constant) and part.value in ("resident", "offload") for part in parts)
            found += [ast.unparse(node)] * is_mode
    return found


def test_only_admission_and_the_mover_look_at_the_mode():
    rooms = tuple(f"nanoinfer/{room}/" for room in ROOMS)
    found = {path for path, source in SOURCES.items() if path.startswith(rooms) and reads_of_the_mode(source)}
    assert found == MAY_LOOK
    assert len(reads_of_the_mode("if tables.is_offload or mode == 'offload': tables.is_offload = may_stream")) == 3


def test_what_lies_beside_the_sources_is_packaged_with_them():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    beside = [path.relative_to(ROOT) for package in ("nanoinfer", "offload") for path in (ROOT / package).rglob("*.*")]
    data = {path for path in beside if path.suffix not in ("", ".py") and "__pycache__" not in path.parts}
    named = [Path(package) / name for package, names in setuptools["package-data"].items() for name in names]
    packaged = {path.relative_to(ROOT) for name in named for path in ROOT.glob(name.as_posix())}
    assert data and data <= packaged


TOOLS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tools").rglob("*.py")}
TESTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("*.py")}
# Private names of our files that a test reads or replaces, where nothing public shows what it asserts.
TESTS_THAT_LOOK_INSIDE = {
    "tests/commands/test_quantize.py": {"_write_header"},
    "tests/engine/test_engine_bad_input.py": {"_thread"},
    "tests/engine/test_llm_streams.py": {"_streams"},
    "tests/gpu/test_llm_gpu.py": {"_thread"},
    "tests/gpu/test_pinned_gpu.py": {"_thread"},
    "tests/gpu/test_weight_files_gpu.py": {"_registered"},
    "tests/offload/test_pinned.py": {"_stop", "_thread"},
    "tests/serve/test_serve_failures.py": {"_inbox", "_thread"},
    "tests/support/repeats.py": {"_made", "_repeated"},
    "tests/weights/test_weight_files.py": {"_Readers", "_cut"},
}


@functools.cache
def private_names(source: str) -> tuple[set[str], set[str]]:
    """The private names that a file makes, and those of others that it uses: what is imported, or no `self`'s."""
    made, used = set(), set()
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            made.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            made.add(node.id)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in ("self", "cls"):
            made.add(node.attr)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {name.name for name in node.names}
    return tuple({name for name in names if name.startswith("_") and not name.endswith("__")} for names in (made, used))


def foreign_names(sources: dict[str, str], ours: dict[str, str]) -> dict[str, set[str]]:
    """For each file the private names that it uses, does not make, and that some file of `ours` makes."""
    known = set().union(*(private_names(source)[0] for source in ours.values()))
    # Most tests have none of these names anywhere: to find them as text is quicker than to parse the file.
    having = {path: source for path, source in sources.items() if not known.isdisjoint(re.findall(r"\b_\w+", source))}
    found = {path: used & known - made for path, (made, used) in ((p, private_names(s)) for p, s in having.items())}
    return {path: names for path, names in found.items() if names}


def test_no_file_uses_another_ones_private_names():
    ours = SOURCES | TOOLS
    assert foreign_names(ours, ours) == {}
    assert foreign_names(TESTS, ours) == TESTS_THAT_LOOK_INSIDE


def test_a_private_name_of_another_file_is_found():
    ours = {"a.py": "class A:\n    def __init__(self):\n        self._x = 1\n    def _y(self): ...\n_z = 2"}
    for line in ("a._x", "a.b._x = 1", "del a._y", "from a import _z", "import a\na._z()", "f(a)._y"):
        assert len(foreign_names({"b.py": line}, ours)["b.py"]) == 1, line
    for line in ("self._x", "torch._other", "a.__dict__", "_x = 1\na._x", "from torch import _other"):
        assert not foreign_names({"b.py": line}, ours), line


def test_no_file_is_longer_than_a_reader_bears():
    assert [path for path, source in SOURCES.items() if source.count("\n") > 400] == []
