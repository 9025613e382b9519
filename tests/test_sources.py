"""What holds for the sources: few files look at the mode."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for package in ("nanoinfer", "offload")
    for path in (ROOT / package).rglob("*.py")
}

# What says which mode is current, or was asked for. `may_offload` is not of them: it says what can ever come.
MODE_NAMES = {"is_offload", "is_resident", "may_stream", "enable_cpu_offload"}
ROOMS = ("models", "layers", "kernels", "execution", "kv")
MAY_LOOK = {"nanoinfer/kv/admission.py", "nanoinfer/kv/mover.py"}


def reads_of_the_mode(source: str) -> list[str]:
    """The names and attributes that are read and say the mode, and comparisons with a mode's name."""
    found = []
    for node in ast.walk(ast.parse(source)):
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
