"""Which file imports which, of the packages."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {module_of(path): path for package in ("nanoinfer", "offload") for path in (ROOT / package).rglob("*.py")}


def last_name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def names_imported(tree: ast.AST) -> set[str]:
    """Modules and names that are imported anywhere, in functions and for type checkers too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.Call) and last_name(node.func) == "import_module":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def imports_of(module: str) -> set[str]:
    """Ours, as files. A name that a package's lazy `__init__` hands on counts as an import of the package."""
    found = {name for name in names_imported(ast.parse(MODULES[module].read_text())) if name in MODULES}
    submodules = {name for name in found if any(other.startswith(name + ".") for other in found)}
    return found - submodules - {module}


@cache
def imports() -> dict[str, set[str]]:
    return {module: imports_of(module) for module in MODULES}
