"""The test files that a change can reach, the nearest first; `python tests/support/near.py [BASE]` prints them.

A file is reached over the imports of product, tests and their support, and over what is named in a text: a module that
a test starts in another process, a document or tool that it reads. BASE: what the change is counted from, as for git.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from arrows import MODULES, ROOT, imports, names_imported

ALWAYS = ("tests/test_sources.py", "tests/test_imports.py")
EVERYTHING = ("tests/conftest.py", "pyproject.toml", "constraints.txt", "Makefile")
"""What every test starts from."""

MOST_ARROWS = 2
"""What lies over the engine reaches every file below it: with more arrows all changes reach all tests."""


def changed(base: str) -> set[str]:
    """Return the files that differ from `base` in the working tree, and new ones."""
    commands = ["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"]
    return {
        name
        for command in commands
        for name in subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    }


def arrows() -> dict[str, set[str]]:
    """Return for each Python file of product, tests and tools those that it imports or names, by their paths."""
    paths = {module: str(path.relative_to(ROOT)) for module, path in MODULES.items()}
    found = {paths[module]: {paths[other] for other in others} for module, others in imports().items()}
    supports = {path.stem: f"tests/support/{path.name}" for path in (ROOT / "tests" / "support").glob("*.py")}
    packages = {path.parent.name: path.parent for path in (ROOT / "tests" / "support").glob("*/__init__.py")}
    for package, folder in packages.items():
        supports |= {f"{package}.{path.stem}": str(path.relative_to(ROOT)) for path in folder.glob("*.py")}
        supports[package] = supports[f"{package}.__init__"]
    tools = {path.name: f"tools/{path.name}" for path in (ROOT / "tools").glob("*.py")}
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").glob("*.py")]:
        text = path.read_text()
        names = names_imported(ast.parse(text)) | set(re.findall(r"\b(?:nanoinfer|offload)(?:\.\w+)+", text))
        own = {supports[name] for name in names if name in supports} | {paths[name] for name in names if name in paths}
        own |= {tools[name] for name in re.findall(r"\w+\.py\b", text) if name in tools}
        own |= {supports[name[:-3]] for name in re.findall(r"\w+\.py\b", text) if name[:-3] in supports}
        if re.search(r"\bnanoinfer\b", text) and "subprocess" in text:
            own.add(paths["nanoinfer.commands.main"])
        found[str(path.relative_to(ROOT))] = own - {str(path.relative_to(ROOT))}
    return found


def reached(files: Iterable[str], most: int = MOST_ARROWS) -> list[str]:
    """Return the test files that are reached from any of these files, the nearest first.

    most: arrows on the way to a test, or to product files whose folder it mirrors.
    """
    tests = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    if any(name in EVERYTHING for name in files):
        return tests
    importers: dict[str, set[str]] = {}
    for name, others in arrows().items():
        for other in others:
            importers.setdefault(other, set()).add(name)
    distance = dict.fromkeys(ALWAYS, 0) | dict.fromkeys(files, 0)
    for name in files:  # documents, data: who reads them names them, or their folder
        if not name.endswith(".py"):
            words = {Path(name).name, *Path(name).parent.parts}
            distance |= {test: 1 for test in tests if any(word in (ROOT / test).read_text() for word in words)}
    open_ = list(distance)
    for name in open_:
        for other in sorted(importers.get(name, ())):
            if other not in distance and distance[name] < most:
                distance[other] = distance[name] + 1
                open_.append(other)
    by_folder: dict[str, int] = {}
    for name in reversed(open_):
        package, *folders = Path(name).parts[:-1]
        if package in ("nanoinfer", "offload"):
            by_folder[folders[0] if package == "nanoinfer" and folders else package] = distance[name]
    far = most + 1
    found = {test: min(distance.get(test, far), by_folder.get(Path(test).parts[1], far)) for test in tests}
    return sorted((test for test in tests if found[test] < far), key=lambda test: (found[test], test))


if __name__ == "__main__":
    print(*(name for name in reached(changed(*sys.argv[1:2] or ["HEAD"])) if not name.startswith("tests/gpu")))
