"""How much host memory can still be taken, on the machine and in each control group that counts this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True)
class _Version:
    """The files of one version of control groups. The files of a group count the groups below it, too.

    Attributes:
        limits: files with the bytes that a group may use. Beyond "high" the kernel makes the group's processes wait.
        cache: entries of memory.stat for files in the page cache. The kernel gives them back before it refuses
            anything. tmpfs and locked pages, which it cannot give back, are in other entries.
        unwritten: entries of memory.stat for the part of `cache` that must be written to a disk first. If the limit is
            reached before the disk is done, the process is killed.
    """

    filesystem: str
    limits: tuple[str, ...]
    used: str
    cache: tuple[str, ...]
    unwritten: tuple[str, ...]


_V1 = _Version(
    filesystem="cgroup",
    limits=("memory.limit_in_bytes",),
    used="memory.usage_in_bytes",
    cache=("total_inactive_file", "total_active_file"),
    unwritten=("total_dirty", "total_writeback"),
)
_V2 = _Version(
    filesystem="cgroup2",
    limits=("memory.max", "memory.high"),
    used="memory.current",
    cache=("inactive_file", "active_file"),
    unwritten=("file_dirty", "file_writeback"),
)


def memory_available_bytes(root: Path = Path("/")) -> int:
    """Return the host memory that can still be taken without pushing anything out to swap.

    This is what the kernel reports of the machine, or what the tightest control group above this process leaves, if
    that is less. A group leaves its limit, less what it uses, plus the files in its page cache, such as weights that
    were read.

    root: the directory that holds /proc and /sys.
    """
    left = [_left(directory, version) for directory, version in _groups(root)]
    return min([psutil.virtual_memory().available, *(bytes_left for bytes_left in left if bytes_left is not None)])


def _left(directory: Path, version: _Version) -> int | None:
    """Return the bytes that one group leaves, or None if it has no limit or does not report its memory."""
    limits = [limit for name in version.limits if (limit := _number(directory / name)) is not None]
    used = _number(directory / version.used)
    if not limits or used is None:
        return None
    entries = dict(line.split(maxsplit=1) for line in _lines(directory / "memory.stat") if " " in line)
    cache, unwritten = (
        sum(int(entries.get(name, 0)) for name in names) for names in (version.cache, version.unwritten)
    )
    limit = min(limits)
    # The files are read one after the other: clamped, because pages may come and go in between.
    return min(limit, max(0, limit - used + max(0, cache - unwritten)))


def _groups(root: Path) -> Iterator[tuple[Path, _Version]]:
    """Yield the directories of the groups that count this process' memory, from its own to the topmost visible one."""
    for line in _lines(root / "proc/self/cgroup"):  # such as 4:cpu,memory:/docker/abc, or 0::/user.slice of version 2
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version = _V1 if controllers else _V2
        for mount_point, below in _places(_mounts(root, version), PurePosixPath(path)):
            for directory in (below, *below.parents):
                yield root / mount_point.lstrip("/") / directory, version


def _places(mounts: list[tuple[str, str]], group: PurePosixPath) -> list[tuple[str, PurePosixPath]]:
    """Return where a group lies: (mount point, path below it).

    If the group lies outside of what the process sees ("/..", or another group's directory is mounted), return the
    mount points themselves: the best that is known.
    """
    seen = [] if ".." in group.parts else [mount for mount in mounts if group.is_relative_to(mount[0])]
    if seen:
        return [(mount_point, group.relative_to(mounted)) for mounted, mount_point in seen]
    return [(mount_point, PurePosixPath()) for _, mount_point in mounts]


def _mounts(root: Path, version: _Version) -> list[tuple[str, str]]:
    """Return where groups that count memory are mounted: (the mounted group, mount point) of each."""
    found = []
    for line in _lines(root / "proc/self/mountinfo"):
        # id, parent, device, root, mount point, options, any number of others, "-", filesystem, source, options of it
        first, _, last = line.partition(" - ")
        fields, filesystem = first.split(), last.split()
        if filesystem[:1] != [version.filesystem]:
            continue
        if version is _V1 and "memory" not in filesystem[-1].split(","):
            continue
        found.append((_unescaped(fields[3]), _unescaped(fields[4])))
    return found


def _unescaped(text: str) -> str:
    r"""Decode escaped characters, such as \040 for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _number(path: Path) -> int | None:
    """Return the number in a file, or None if there is no such file or it says "max"."""
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
