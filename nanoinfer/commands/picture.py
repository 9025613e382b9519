"""An engine's figures as a picture in a terminal: what lies where, what streams, how fast, and what bounds it.

What is shown was measured: states as of the newest figures, rates between these and those shown before.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from nanoinfer.common.terminal import without_orders
from nanoinfer.common.units import format_size

_WIDTH = 24  # of a bar
_Row = tuple[str, Text | str, str]


class Picture:
    """The picture of one engine, made anew from each of its figures.

    Args:
        facts: what never changes, by the names of `FACTS`.
    """

    def __init__(self, facts: dict[str, Any], name: str = "") -> None:
        self._facts, self._name = facts, name
        self._before: tuple[float, dict[str, Any]] | None = None
        self._rates: dict[str, float] = {}
        self._figures: dict[str, Any] = {}
        self._said = ""

    def update(self, figures: dict[str, Any], read: float, age: float = 0.0, step_seconds: float = 0.0) -> None:
        """Take newer figures, which were read at `read`, in seconds of any clock."""
        if self._before is not None and read > self._before[0]:
            seconds, before = read - self._before[0], self._before[1]
            numbers = {name: value for name, value in figures.items() if isinstance(value, int | float)}
            self._rates = {name: (value - before[name]) / seconds for name, value in numbers.items() if name in before}
        if self._before is None or read > self._before[0]:
            self._before = read, {name: value for name, value in figures.items() if isinstance(value, int | float)}
        self._figures = figures
        self._said = f"a step has run for {step_seconds:.1f} s" if step_seconds > 1 else f"figures of {age:.1f} s ago"

    def __rich__(self) -> Group:
        table = Table(box=None, show_header=False, padding=(0, 1), pad_edge=False)
        for row in self._rows() if self._figures else ():
            table.add_row(*row)
        name = f" {without_orders(self._name)}" if self._name else ""
        head = f"{without_orders(str(self._facts['model']))}{name}: {self._figures.get('mode', '')} mode, {self._said}"
        return Group(Text(head, style="bold"), table)

    def _rows(self) -> list[_Row]:
        facts, now, rate = self._facts, self._figures, self._rates
        device = "in memory" if facts["is_host"] else "on the GPU"
        rows = [("batch", bar(now["num_running"], facts["max_num_seqs"]),
                 f"{now['num_running']} run of {facts['max_num_seqs']}, {now['num_waiting']} wait")]  # fmt: skip
        rows.append(self._blocks(f"KV {device}", "gpu"))
        if now["host_blocks_total"]:
            rows.append(self._blocks("KV on the host", "host"))
        if resident := now["kv_blocks_resident"] + now["kv_blocks_streamed"]:
            rows.append(("a step reads", bar(now["kv_blocks_resident"], resident),
                         f"{now['kv_blocks_resident']:,} full blocks {device}, {now['kv_blocks_streamed']:,} through "
                         f"the ring of {format_size(facts['ring_bytes'])}"))  # fmt: skip
        if now["state_slots_total"]:
            rows.append(("states", bar(now["state_slots_used"], now["state_slots_total"]),
                         f"{now['state_slots_used']} of {now['state_slots_total']}, {now['num_snapshots']:,} snapshots "
                         "were kept"))  # fmt: skip
        rows += self._weights(device)
        if not facts["is_host"]:
            rows.append(self._link())
        decoded = rate.get("num_decode_tokens", 0.0)  # what steps with prompts made besides is not of decode steps
        generated = rate.get("num_generated_tokens", decoded)
        steps, floor = rate.get("num_decode_steps", 0.0), now["step_floor_seconds"]
        allowed = f" where link and memory allow {decoded / steps / floor:,.1f}" if steps and floor else ""
        rows.append(("tokens", "", f"{generated:,.1f}/s out{allowed}, "
                     f"{rate.get('num_prefill_tokens', 0.0):,.1f}/s of prompts computed, "
                     f"{rate.get('prefix_cache_hit_tokens', 0.0):,.1f}/s found in the cache"))  # fmt: skip
        if queried := now["prefix_cache_queried_tokens"]:
            parted = f"; a prompt parted at token {now['prefix_parted_last']}" if now.get("prefix_parted_last") else ""
            hits = now["prefix_cache_hit_tokens"]
            text = f"{hits / queried:.0%} of the prompts' tokens so far{parted}"
            rows.append(("prefix cache", bar(hits, queried), text))
        if drafted := now["num_drafted_tokens"]:
            accepted = now["num_accepted_tokens"]
            rows.append(
                ("drafts", bar(accepted, drafted), f"{accepted / drafted:.0%} of the guessed tokens were right")
            )
        if now.get("is_computing_ahead"):
            rows.append(("ahead", "", "what runs is computed ahead, for prompts that may come"))
        is_prefill = rate.get("prefill_seconds", 0.0) > rate.get("decode_seconds", 0.0)
        rows.append(("bound by", "", "prefill" if is_prefill else now["bound"]))
        return rows

    def _blocks(self, name: str, tier: str) -> _Row:
        total, used, cached = (self._figures[f"{tier}_blocks_{kind}"] for kind in ("total", "used", "cached"))
        size = format_size(total * self._facts["block_bytes"])
        return name, bar(used, total, cached), f"{used:,} blocks held, {cached:,} cached, of {total:,} ({size})"

    def _weights(self, device: str) -> list[_Row]:
        facts, now, rate = self._facts, self._figures, self._rates
        on_host, streamed = facts["host_weight_bytes"], now["streamed_weight_bytes"]
        text = f"{format_size(facts['weight_bytes'])} {device}"
        if on_host:
            text += f", {format_size(on_host)} in host memory"
        if streamed:
            text += f", {format_size(streamed)} of it stream in each step"
        rows = [("weights", bar(facts["weight_bytes"], facts["weight_bytes"] + on_host), text)]
        if facts["num_expert_slots"]:
            hits, fetches = rate.get("expert_hits", 0.0), rate.get("expert_fetches", 0.0)
            share = (
                f"{hits / (hits + fetches):.0%} of those chosen were found" if hits + fetches else "none are asked for"
            )
            rows.append(("experts", bar(hits, hits + fetches),
                         f"{facts['num_expert_slots']} of {facts['num_experts']} of a layer may lie {device}; {share}, "
                         f"{format_size(rate.get('expert_fetched_bytes', 0.0))}/s brought"))  # fmt: skip
        return rows

    def _link(self) -> _Row:
        now, rate, most = self._figures, self._rates, self._facts["link_bytes_per_second"]
        streamed = rate.get("streamed_bytes", 0.0)
        return "link", bar(streamed, most), (
            f"{streamed / 1e9:.2f} GB/s of {most / 1e9:.0f}, busy {now['link_busy_fraction']:.0%} of decode; "
            f"{rate.get('written_bytes', 0.0) / 1e9:.2f} GB/s written"
        )  # fmt: skip


def bar(part: float, whole: float, more: float = 0) -> Text:
    """Return a bar whose first part is full, and whose second one, `more`, is light."""
    first = round(_WIDTH * min(1.0, part / whole)) if whole else 0
    second = round(_WIDTH * min(1.0, (part + more) / whole)) - first if whole else 0
    return Text.assemble("█" * first, ("▒" * second, "dim"), ("░" * (_WIDTH - first - second), "dim"))
