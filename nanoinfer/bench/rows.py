"""What `nanoinfer bench offload` shows of its rows: comparison, table and picture."""

from __future__ import annotations

from pathlib import Path

from nanoinfer.measure.answers import first_difference
from nanoinfer.measure.report import table
from nanoinfer.measure.run import Row

COLUMNS = {
    "mode": "{mode}",
    "batch": "{batch}",
    "context": "{context}",
    "prefill tok/s": "{prefill_tokens_per_second:,.0f}",
    "TTFT s": "{time_to_first_token:,.3f}",
    "ms/token": "{seconds_per_token!m:,.2f}",
    "tok/s": "{tokens_per_second:,.1f}",
    "KV on GPU": "{kv_resident_share:.0%}",
    "MB/step": "{streamed_bytes_per_step!M:,.1f}",
    "link GB/s": "{link_gbps:,.1f}",
    "floor ms": "{floor_seconds!m:,.2f}",
    "x floor": "{ratio_to_floor:,.3f}",
    "forecast ms": "{forecast_seconds!m:,.2f}",
    "x forecast": "{ratio_to_forecast:,.3f}",
    "bound by": "{bound}",
    "GPU GiB": "{peak_gpu_bytes!g:,.2f}",
    "host GiB": "{host_bytes!g:,.2f}",
    "check": "{check}",
}
"""Title and text of each column; see `measure.report`."""


def compare(rows: list[Row]) -> None:
    """Note for each row of our modes whether its bits equal those of the first row with its batch and context."""
    firsts: dict[tuple[int, int], Row] = {}
    for row in rows:
        if not row.outputs or row.mode.startswith("hf"):
            continue
        first = firsts.setdefault((row.batch, row.context), row)
        if first is not row:
            positions = map(first_difference, first.outputs, row.outputs)
            difference = next(((i, position) for i, position in enumerate(positions) if position is not None), None)
            row.check = f"identical to {first.mode}"
            if difference is not None:
                row.check = f"DIFFERS from {first.mode} in sequence {difference[0]} at token {difference[1]}"


def report(rows: list[Row]) -> str:
    """Return the rows as a table, what kept some from being measured, and how far the link can be trusted."""
    emulated = next((row.emulated_link_gbps for row in rows if row.emulated_link_gbps), None)
    figures, columns = [vars(row) for row in rows], COLUMNS
    text = []
    if emulated is not None:
        text.append(
            f"the link is emulated: {emulated:g} GB/s in each direction, of which floors and forecasts are, too"
        )
        columns = {title.replace("link", "emulated link"): cell for title, cell in COLUMNS.items()}
        figures = [row | {"bound": (row["bound"] or "-").replace("link", "emulated link")} for row in figures]
    text.append(table(figures, columns.items()))
    text += [f"{row.mode}, {row.batch} x {row.context}: {row.problem}" for row in rows if row.problem]
    moved = [row.link_moved for row in rows if row.link_moved is not None and row.link_moved > 0.02]
    if moved:
        text.append(f"the link moved by up to {max(moved):.0%} during the run: ratios are that uncertain")
    return "\n".join(text)


def plot(path: str | Path, rows: list[Row]) -> None:
    """Plot ms per token over context: one line per mode and batch, and the floor of each. rows: contexts ascending."""
    lines: dict[str, list[tuple[int, float, float | None]]] = {}
    for row in rows:
        if row.seconds_per_token:
            point = row.context, row.seconds_per_token, row.floor_seconds
            link = f", emulated link of {row.emulated_link_gbps:g} GB/s" if row.emulated_link_gbps else ""
            lines.setdefault(f"{row.mode} x{row.batch}{link}", []).append(point)
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
