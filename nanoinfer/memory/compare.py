"""One model on all cards of the table: what fits, what streams, and how fast a step can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoinfer.common.units import format_gib
from nanoinfer.memory.cards import CARDS
from nanoinfer.memory.forecast import Forecast
from nanoinfer.memory.forecaster import forecaster
from nanoinfer.memory.rates import Rates


def compare_gpus(
    model: str | Path, *, host_memory_limit: int | str | None = None, max_model_len: int | None = None,
    batch: int | None = None,
    **arguments: Any,
) -> dict[str, Forecast]:  # fmt: skip
    """Return a decode step at full context on each card, by the card's name; for the arguments see `plan`.

    The forecasts have no limits, proposals or advice.
    """
    wanted = dict(host_memory_limit=host_memory_limit, max_model_len=max_model_len, batch=batch)
    wanted |= dict(gpu_memory_limit=None, link_gbps=None, device_gbps=None)
    any_card = forecaster(model, gpu=CARDS[-1].name, **wanted, **arguments)
    forecasts = {}
    for card in CARDS:
        rates = dict(link_gbps=card.link_gbps, device_gbps=card.device_gbps)
        asked = replace(any_card.asked, budget_bytes=card.memory_bytes, **rates)
        one = replace(any_card, asked=asked, lacks_float8=card.lacks_float8, rates=Rates.of_card(card))
        try:
            forecasts[card.name] = one.step()
        except ValueError as error:  # such as a format that this card cannot run
            forecasts[card.name] = replace(asked, problem=str(error))
    return forecasts


def report(forecasts: dict[str, Forecast]) -> str:
    """Return a table of all cards."""
    first = next(iter(forecasts.values()))
    rows = [["card", "GiB", "GB/s", "link", "fits", "streamed", "ms a step", "tokens/s"]]
    for card in CARDS:
        step = forecasts[card.name]
        row = [card.name, f"{card.memory_bytes / 2**30:.1f}", f"{card.device_gbps:g}", f"{card.link_gbps:g}"]
        if step.fits:
            streamed = step.streamed_bytes_per_step
            row += ["yes", f"{format_gib(streamed)} GiB" if streamed else "nothing"]
            row += [f"{step.ms_per_token:.1f}", f"{step.tokens_per_second:.0f}"]
        else:
            row += ["no", "", "", ""]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    title = f"{first.model}, {first.batch} x {first.context:,} tokens: what a program gets of each card, and the least"
    assumed = f"; {first.tokens_per_pass:g} tokens a pass are assumed" if first.tokens_per_pass > 1 else ""
    return "\n".join([f"{title} time of a step{assumed}", "", *lines])
