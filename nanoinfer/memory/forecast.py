"""What `nanoinfer.plan` says: what fits and how fast it can be."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from nanoinfer.common.units import format_gib, format_size
from nanoinfer.memory.proposals import Proposal
from nanoinfer.step.memory_plan import MemoryPlan


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What an engine will take, hold and reach. Sizes in bytes, lengths in tokens.

    Attributes:
        problem: why it does not fit and what to do; None where it fits. Where it does not, of the figures below only
            `longest_context` may be given.
        memory: the engine's plan.
        kv_bytes: KV cache of `batch` sequences of `context` tokens, in whole blocks.
        resident_kv_bytes: the part of it that stays on the GPU.
        host_kv_bytes: what lies in host memory; in offload mode each full block does, streamed or not.
        streamed_bytes_per_step: what each decode step moves over the link, weights and KV.
        tokens_per_pass: tokens that each sequence is assumed to gain in a step; more than 1: by drafts.
        longest_context: the longest that fits with this batch.
        longest_resident_context: the longest at which nothing streams.
        largest_batch: the largest that fits with this context.
        ms_per_token: floor of a decode step, which gives each sequence a token, or `tokens_per_pass`; of a sparse
            model, whose step has few bytes, with what its layers take besides. None where nothing streams and no device
            bandwidth was stated.
        ms_at_hit_rate: where experts lie in host memory, this floor by the share of chosen ones that are on the GPU.
            `ms_per_token` is for experts that are all chosen equally often, the worst case.
        is_floor: whether no step can be faster; of a sparse model `ms_per_token` is what steps were seen to take.
        bound: what sets this floor: "link" or "device memory".
        proposals: settings that make it fit or, where it streams, that make its steps faster, cheapest first.
        advice: what more memory would do, which stands behind them.
        notes: what is special about the card that was named.
    """

    model: str
    context: int
    batch: int
    link_gbps: float
    device_gbps: float | None
    budget_bytes: int
    host_budget_bytes: int
    tokens_per_pass: float = 1
    problem: str | None = None
    memory: MemoryPlan | None = None
    kv_bytes: int | None = None
    resident_kv_bytes: int | None = None
    host_kv_bytes: int | None = None
    streamed_bytes_per_step: int | None = None
    read_bytes_per_step: int | None = None
    longest_context: int | None = None
    longest_resident_context: int | None = None
    largest_batch: int | None = None
    ms_per_token: float | None = None
    ms_at_hit_rate: dict[float, float] = field(default_factory=dict)
    bound: str | None = None
    is_floor: bool = True
    proposals: tuple[Proposal, ...] = ()
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def resident_share(self) -> float:
        """Share of the KV cache that stays on the GPU."""
        return self.resident_kv_bytes / self.kv_bytes if self.kv_bytes else 1.0

    @property
    def tokens_per_second(self) -> float | None:
        """The most that all sequences together can get; None where `ms_per_token` is."""
        return self.batch * self.tokens_per_pass / self.ms_per_token * 1e3 if self.ms_per_token else None

    def _speed(self) -> str:
        if self.ms_per_token is None:
            return 'nothing streams; name the card, such as gpu="RTX 4070", or state device_gbps for the time of a step'
        least, most = ("at least", "at most") if self.is_floor else ("about", "about")
        rate = f"{most} {self.tokens_per_second:.1f} tokens/s"
        return f"{least} {self.ms_per_token:.1f} ms per step, {rate} ({self.bound})"

    def report(self) -> str:
        """Return a table, or what to do if the model does not fit."""
        lines = [f"{self.model}, {self.batch} x {self.context:,} tokens"]
        if self.fits and self.memory.max_running > self.batch:
            lines[0] += f", of up to {self.memory.max_running} sequences at once"
        if self.fits:
            lines += [""] + self._table()
        else:
            lines += ["", f"does not fit: {self.problem}"]
        lines += [""] * bool(self.notes) + [f"note: {note}" for note in self.notes]
        if self.proposals or self.advice:
            lines += ["", "what would help, cheapest first:"]
        for proposal in self.proposals:
            first, *rest = proposal.lines()
            lines += [f"  - {first}", *(f"    {line}" for line in rest)]
        lines += [f"  - {text}" for text in self.advice]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        memory = self.memory
        streams = self.streamed_bytes_per_step
        buffers = memory.workspace_bytes + memory.library_bytes
        rates = [f"{self.link_gbps:g} GB/s over the link"] if streams else []
        rates += [f"{self.device_gbps:g} GB/s on the device"] if self.device_gbps else []
        weights, on_host = memory.streamed_bytes, (self.host_kv_bytes or 0) + memory.host_weight_bytes
        slots, by_rate = memory.num_expert_slots, self.ms_at_hit_rate
        streamed = "nothing" if not streams else format_size(streams)
        if slots:
            streamed += ", experts that are chosen equally often among it, the worst case"
        if weights:
            streamed += f", {format_size(weights)} of it weights: what does not fit lies in host memory"
        embeddings = ""
        if memory.read_there_bytes:
            embeddings = f"; embeddings, {format_size(memory.read_there_bytes)}, lie in host memory"
        if memory.head_bytes:
            embeddings += f"; the head, {format_size(memory.head_bytes)}, is streamed in slices"
        rows = [
            ("GPU memory", f"{format_gib(memory.total_bytes)} of {format_gib(self.budget_bytes)} GiB"),
            ("  weights", format_size(memory.weight_bytes) + embeddings),
            *([("  places", f"{format_size(memory.landing_bytes)}, for {_streamed(memory)}")] if weights else []),
            *([("  experts", f"{format_size(memory.landing_bytes)}, {memory.num_expert_slots} of each layer; all "
                             f"{format_size(memory.expert_bytes)} lie in host memory")] if slots else []),
            ("  working memory", f"{format_size(memory.activation_bytes)}, "
                                 f"{memory.max_num_batched_tokens:,} tokens of a prompt at a time"),
            ("  buffers", f"{format_size(buffers)}, workspaces of libraries included"),
            ("  graphs", format_size(memory.graph_bytes)),
            ("  ring", f"{format_size(memory.ring_bytes)}, through which KV streams, whatever the context"),
            ("  KV cache", f"{format_size(memory.pool_bytes)}, what is left"),
            ("host memory", f"{format_gib(on_host)} of {format_gib(self.host_budget_bytes)} GiB"
                            if on_host else "none is needed"),
            ("whole KV cache", f"{format_size(self.kv_bytes)}, {self.resident_share:.1%} of it stays on the GPU"),
            ("streamed per step", streamed),
            ("longest context", f"{_count(self.longest_context)} tokens for {_sequences(self.batch)}, "
                                f"{_count(self.longest_resident_context)} with nothing to stream"),
            ("largest batch", f"{_count(self.largest_batch)} of {self.context:,} tokens"),
            ("decode step", f"{self._speed()}{', at ' if rates else ''}{', '.join(rates)}"),
            *([("  assumed", f"{self.tokens_per_pass:g} tokens a pass, which drafts bring where text repeats; without "
                             "them it is 1")] if self.tokens_per_pass > 1 else []),
            *([("  by hit rate", ", ".join(f"{ms:.1f} ms at {rate:.0%}" for rate, ms in by_rate.items())
                                 + " of the chosen experts on the GPU")] if slots else []),
        ]  # fmt: skip
        width = max(len(name) for name, _ in rows)
        return [f"{name:{width}}  {value}" for name, value in rows]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def _streamed(memory: MemoryPlan) -> str:
    """Name what passes through the landing buffers."""
    if not memory.head_bytes:
        return "layers that are streamed"
    return "layers and a head that are streamed" if memory.streamed_pieces else "the head, which is streamed"


def _count(number: int | None) -> str:
    return f"{number:,}" if number else "none"


def _sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"{count} sequences"
