"""How results are written: tables, lists, JSON with what is needed to judge it.

A text may have figures in it, as `str.format` takes them: "{num_steps:,} steps". What is None is shown as "-".
"""

from __future__ import annotations

import json
import platform
import string
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nanoinfer.devices.registry import device_of
from nanoinfer.memory.floors import Floors

UNITS = {"m": 1e3, "M": 1e-6, "G": 1e-9, "g": 2**-30}
"""Factors by conversion: "{seconds!m:.1f}" is in thousandths, !M in millions, !G in thousand millions, !g in GiB."""


class _Writer(string.Formatter):
    def convert_field(self, value: Any, conversion: str | None) -> Any:
        return value if value is None or conversion is None else value * UNITS[conversion]

    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else format(value, format_spec)


def say(text: str, figures: Mapping[str, Any]) -> str:
    """Return the text with figures, by name, in it."""
    return _Writer().vformat(text, (), figures)


def table(rows: Iterable[Mapping[str, Any]], columns: Iterable[tuple[str, str]]) -> str:
    """Return a line for each row's figures; columns: title and text of each."""
    titles, texts = zip(*columns, strict=True)
    return aligned([list(titles), *([say(text, row) for text in texts] for row in rows)])


def aligned(lines: list[list[str]]) -> str:
    """Return lines of cells as text in columns; the first line has the titles, the first column names."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))])
        for first, *cells in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def listed(lines: Mapping[str, str], width: int = 0) -> str:
    """Return texts behind their names, in one column; a text may have several lines. width: of the names at least."""
    width = max(width, *map(len, lines))
    return "\n".join(f"{name:<{width}}" + text.replace("\n", "\n" + " " * width) for name, text in lines.items())


def paragraph(title: str, lines: Mapping[str, str], figures: Mapping[str, Any]) -> str:
    """Return a title above a line for each name, with its text and the figures in it."""
    texts = {f"  {name}  ": say(text, figures) for name, text in lines.items()}
    return f"{title}\n{listed(texts)}"


def explain(floors: Floors, device: torch.device) -> str:
    """Say what the floors of this run are."""
    text = (
        "link {link!G:.1f} GB/s (one large pinned copy), device {device!G:.0f} GB/s (one large copy, read + written)"
        if not device_of(device).is_host
        else "main memory {link!G:.1f} GB/s (one large copy) stands for the link and {device!G:.1f} GB/s (read + "
        "written) for the device; without a GPU this shows that it runs, not how fast"
    )
    own = floors if floors.own_link is None else replace(floors, link=floors.own_link)
    if own is not floors:
        text += f"; the link is emulated, at {floors.link / 1e9:g} GB/s in each direction"
    return "floors of this run: " + say(text, vars(own))


def versions(device: torch.device) -> dict[str, str | None]:
    """Return the versions of the software that the figures were measured with."""
    software: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("torch", "triton", "transformers", "flash_attn"):
        try:
            software[package] = version(package)
        except PackageNotFoundError:
            software[package] = None
    described = device_of(device)
    software["device"] = f"{described.name}, {platform.machine()}" if described.is_host else described.name
    return software


def write_figures(
    path: str | Path | None, figures: dict, command: str, device: torch.device | None, floors: Floors | None = None
) -> None:
    """Write figures by name, and what is needed to judge and repeat them: the command, versions and floors.

    path: None: nowhere. device: what the figures were measured on; None: not on this machine.
    """
    if path is None:
        return
    content: dict = {"command": command}
    if device is not None:
        content["versions"] = versions(device)
    if floors is not None:
        content["floors"] = {"link_bytes_per_second": floors.link, "device_bytes_per_second": floors.device}
        if floors.own_link is not None:
            content["floors"] |= {"link_is_emulated": True, "own_link_bytes_per_second": floors.own_link}
    Path(path).write_text(json.dumps(content | figures, indent=1) + "\n")
