"""The output of the benchmarks: tables, JSON and the picture."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from nanoinfer.measure.run import Row
from nanoinfer.memory.floors import Floors

COLUMNS = [
    "mode", "batch", "context", "prefill tok/s", "TTFT s", "ms/token", "tok/s", "KV on GPU", "MB/step", "link GB/s",
    "floor ms", "x floor", "bound by", "GPU GiB", "host GiB", "check",
]  # fmt: skip


def table(rows: list[Row]) -> str:
    """Return the rows as aligned text."""
    text = [aligned([COLUMNS] + [_cells(row) for row in rows])]
    text += [f"{row.mode}, {row.batch} x {row.context}: {row.problem}" for row in rows if row.problem]
    moved = [row.link_moved for row in rows if row.link_moved is not None and row.link_moved > 0.02]
    if moved:
        text.append(f"the link moved by up to {max(moved):.0%} during the run: ratios are that uncertain")
    return "\n".join(text)


def aligned(lines: list[list[str]]) -> str:
    """Return lines of cells as text in columns; the first line has the titles."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def _cells(row: Row) -> list[str]:
    def number(value: float | None, digits: int, factor: float = 1) -> str:
        return "-" if value is None else f"{value * factor:,.{digits}f}"

    return [
        row.mode,
        str(row.batch),
        str(row.context),
        number(row.prefill_tokens_per_second, 0),
        number(row.time_to_first_token, 3),
        number(row.seconds_per_token, 2, 1e3),
        number(row.tokens_per_second, 1),
        "-" if row.kv_resident_share is None else f"{row.kv_resident_share:.0%}",
        number(row.streamed_bytes_per_step, 1, 1e-6),
        number(row.link_gbps, 1),
        number(row.floor_seconds, 2, 1e3),
        number(row.ratio_to_floor, 3),
        row.bound or "-",
        number(row.peak_gpu_bytes, 2, 2**-30),
        number(row.host_bytes, 2, 2**-30),
        row.check or "-",
    ]


def explain(floors: Floors, device: torch.device) -> str:
    """Say what the floors of this run are."""
    if device.type == "cuda":
        return (
            f"floors of this run: link {floors.link / 1e9:.1f} GB/s (one large pinned copy), device "
            f"{floors.device / 1e9:.0f} GB/s (one large copy, read + written)"
        )
    return (
        f"floors of this run: main memory {floors.link / 1e9:.1f} GB/s (one large copy) stands for the link and "
        f"{floors.device / 1e9:.1f} GB/s (read + written) for the device; without a GPU this shows that it runs, not "
        "how fast"
    )


def versions(device: torch.device) -> dict[str, str | None]:
    """Return the versions of the software that the figures were measured with."""
    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("torch", "triton", "transformers", "flash_attn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    is_cuda = device.type == "cuda"
    found["device"] = torch.cuda.get_device_name(device) if is_cuda else f"CPU, {platform.machine()}"
    return found


def paragraph(title: str, lines: list[tuple[str, str]]) -> str:
    """Return a title above lines of (what, how much), with the second parts in one column."""
    width = max(len(name) for name, _ in lines)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in lines)])


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
    Path(path).write_text(json.dumps(content | figures, indent=1) + "\n")


def plot(path: str | Path, rows: list[Row]) -> None:
    """Plot ms per token over context: one line per mode and batch, and the floor of each. rows: contexts ascending."""
    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    for row in rows:
        if row.seconds_per_token:
            point = row.context, row.seconds_per_token, row.floor_seconds
            lines.setdefault(f"{row.mode} x{row.batch}", []).append(point)
    draw_steps(path, lines)


def draw_steps(path: str | Path, lines: dict[str, list[tuple[int, float, float | None]]]) -> None:
    """Draw ms per decode step over context.

    lines: by label, points (tokens of context, seconds, seconds of the floor or None), contexts ascending. Floors are
    dotted; equal ones are drawn once.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5))
    axes = figure.subplots()
    contexts = sorted({context for line in lines.values() for context, _, _ in line})
    drawn_floors = []
    for label, line in lines.items():
        (drawn,) = axes.plot([point[0] for point in line], [point[1] * 1e3 for point in line], "o-", label=label)
        floors = [(context, floor * 1e3) for context, _, floor in line if floor is not None]
        if floors and floors not in drawn_floors:
            drawn_floors.append(floors)
            axes.plot(*zip(*floors, strict=True), ":", color=drawn.get_color(), label=f"floor of {label}")
    axes.set(xlabel="context, k tokens", ylabel="ms per decode step", xscale="log", yscale="log")
    axes.set_xticks(contexts, [f"{context / 1024:g}" for context in contexts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))  # beside the lines, which go everywhere
    figure.tight_layout()
    figure.savefig(path, dpi=120)
