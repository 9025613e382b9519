"""What would help a model that does not fit, or streams: one list, cheapest first. Each is a forecast of its own.

First what costs nothing that is asked for, then fewer tokens, then formats by what they lose, then fewer sequences.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from nanoinfer.common.units import GIB, format_gib
from nanoinfer.config import EngineConfig
from nanoinfer.models.checkpoints import checkpoint_named
from nanoinfer.models.shapes import SHAPES
from nanoinfer.options.engine import option_words
from nanoinfer.step.memory_plan import MemoryPlan

# From the least loss to the most (docs/quantization.md has the losses that were measured).
_WEIGHTS = (
    {},
    {"head_quantization": "int8"},
    {"quantization": "int8"},
    {"quantization": "fp8"},
    {"quantization": "int4"},
    {"quantization": "int4", "head_quantization": "int8"},
)
_SHARES = {None: 0.0, "int8": 0.5, "fp8": 0.5, "int4": 0.25}  # at the least, of what weights take in 16 bits
_KV = ({}, {"kv_cache_dtype": "int8"})
_WORDS = {
    "quantization": "weights in {}",
    "head_quantization": "head and embeddings in {}",
    "kv_cache_dtype": "KV in {}",
    "enable_cpu_offload": "KV blocks in host memory, too",
    "host_memory_limit": "{} of host memory",
    "max_num_batched_tokens": "prefill steps of {:,} tokens, which are slower",
    "max_model_len": "at most {:,} tokens of each sequence",
    "max_num_seqs": "at most {:,} sequences at once",
}
# Changes that are said in words of their own.
_SAID = {
    ("enable_cpu_offload", False): "no KV in host memory",
    ("max_num_seqs", 1): "one sequence at a time",
    ("expert_slots", None): "as many experts on the GPU as there is room for",
}
MOST_FORMATS = 6
_SHORTEST = 1024  # shorter contexts are not worth proposing
_FASTER = 0.95  # Of two formats the one that loses more is named only if its step takes at most this share of time.


class Outcome(Protocol):
    """What is known of a step with changed settings: of a `Forecast`, what is needed here."""

    fits: bool
    memory: MemoryPlan | None
    streamed_bytes_per_step: int | None
    ms_per_token: float | None
    is_floor: bool
    context: int
    batch: int
    longest_resident_context: int | None


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """Settings with which a model fits, or streams less.

    Attributes:
        what: the settings that change, in words.
        changes: the same as fields of `EngineConfig`.
        memory_bytes: of the GPU, at its peak.
        streamed_bytes_per_step, ms_per_token, is_floor: as in `Forecast`.
        command: a command that runs it, to paste.
    """

    what: str
    changes: dict[str, Any]
    memory_bytes: int
    streamed_bytes_per_step: int
    ms_per_token: float | None
    command: str
    is_floor: bool = True

    def lines(self) -> list[str]:
        """Return what a report says."""
        least = "at least" if self.is_floor else "about"
        speed = f"{least} {self.ms_per_token:.1f} ms per step" if self.ms_per_token else "nothing streams"
        return [f"{self.what}: {format_gib(self.memory_bytes)} GiB of GPU memory, {speed}", f"  {self.command}"]


@dataclass(frozen=True)
class Proposer:
    """Looks for proposals for a config: its `max_model_len` and `max_num_seqs` are what is wanted, if they are given.

    step: the outcome of a config; ValueError where the checkpoint cannot have its formats.
    longest: the longest context of a config that fits, or 0.
    context: tokens that are planned for; where the config says none, a plan may hold fewer.
    experts_bytes: of weights in host memory, where experts have slots; 0: they cannot.
    wide_bytes, memory_bytes: of weights in 16 bits, if they are, and of the GPU and the host together.
    packs: whether weights in fewer bits can be read there.
    """

    config: EngineConfig
    step: Callable[[EngineConfig], Outcome]
    longest: Callable[[EngineConfig], int]
    context: int = 0
    experts_bytes: int = 0
    wide_bytes: int = 0
    memory_bytes: int = 0
    packs: bool = True

    def to_fit(self) -> tuple[Proposal, ...]:
        """Return what makes the config fit: all that it wants, with the least loss first; then less of it."""
        proposals = [made for changes in self._without_loss() if (made := self._propose(changes)) is not None]
        proposals += self._formats(float("inf"))
        return (*proposals, *self._less())

    def to_be_faster(self, now: Outcome) -> tuple[Proposal, ...]:
        """Return what takes less than a step takes now, cheapest first, each faster than all before it."""
        proposals: list[Proposal] = []
        for changes in (*self._settings(now), *self._shorter(now)):
            made = self._propose(changes)
            times = [now.ms_per_token, *(one.ms_per_token or 0.0 for one in proposals)]
            if made is not None and (made.ms_per_token or 0.0) < _FASTER * min(times):
                proposals.append(made)
        return (*proposals, *self._formats(now.ms_per_token), *self._fewer(now))

    def _settings(self, now: Outcome) -> Iterator[dict[str, Any]]:
        """Yield settings that may be faster and cost nothing that was asked for."""
        config, memory = self.config, now.memory
        if config.max_num_batched_tokens is not None:
            yield {"max_num_batched_tokens": None}
        if self.experts_bytes and not memory.num_expert_slots:
            # With less of the host's memory fewer sequences run at once, for which experts in slots are faster.
            kv_bytes = memory.groups.num_blocks(now.context) * memory.block_bytes * now.batch
            yield {"host_memory_limit": f"{-(-(self.experts_bytes + kv_bytes) // GIB)}GiB"}
        if config.may_offload:
            yield {"enable_cpu_offload": False}

    def _shorter(self, now: Outcome) -> Iterator[dict[str, Any]]:
        """Yield shorter contexts: half of it, and the longest with which nothing streams, if that is no quarter."""
        lengths = sorted({now.context // 2, now.longest_resident_context or 0}, reverse=True)
        shortest = max(_SHORTEST, now.context // 4)
        yield from ({"max_model_len": tokens} for tokens in lengths if shortest <= tokens < now.context)

    def _fewer(self, now: Outcome) -> list[Proposal]:
        """Return half of the sequences, if those are given and get more tokens in all."""
        half = (self.config.max_num_seqs or 1) // 2
        made = self._propose({"max_num_seqs": half}) if half else None
        if made is None or (made.ms_per_token or 0.0) * now.batch > _FASTER * now.ms_per_token * half:
            return []
        return [made]

    def leanest(self) -> EngineConfig:
        """Return the config with all that saves memory and that the checkpoint can have."""
        for changes in reversed(list(self._all_formats())):
            config = replace(self.config, **self._relaxed(), **changes)
            if self._outcome(config) is not None:
                return config
        return replace(self.config, **self._relaxed())

    def words(self, config: EngineConfig) -> str:
        """Return in words how this config differs from the one that is wanted."""
        return in_words(_changes(self.config, config))

    def _formats(self, slowest: float) -> list[Proposal]:
        """Return what fits in other formats: each change alone, and those together that are faster than all before."""
        proposals: list[Proposal] = []
        for changes in self._all_formats():
            if len(proposals) == MOST_FORMATS:
                break
            if proposals and slowest < float("inf") and not proposals[-1].ms_per_token:
                break  # nothing can be faster
            made = self._propose(changes) or self._propose(self._relaxed() | changes)
            if made is None:
                continue
            times = [slowest, *(one.ms_per_token or 0.0 for one in proposals)]
            is_faster = (made.ms_per_token or 0.0) < _FASTER * min(times)
            if is_faster or len(changes) == 1 and slowest == float("inf"):
                proposals.append(made)
        return proposals

    def _less(self) -> Iterator[Proposal]:
        """Yield what fits with fewer tokens or sequences."""
        wanted = self.config.max_model_len
        relaxed = self._relaxed()
        tried = ({}, *([relaxed] if relaxed else ()), *(relaxed | formats for formats in self._all_formats()))
        for changes in tried:
            config = replace(self.config, **changes)
            tokens = 0 if self._outcome(config) is None else self.longest(config)
            if tokens and (wanted is None or tokens < wanted):
                made = self._propose(changes | {"max_model_len": tokens})
                if made is not None:
                    yield made
                    break
        low, high = 0, self.config.max_num_seqs or 0  # the first fits or is none, the second does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = self._propose({"max_num_seqs": middle}) is not None
            low, high = (middle, high) if fits else (low, middle)
        if low:
            yield self._propose({"max_num_seqs": low})

    def _without_loss(self) -> list[dict[str, Any]]:
        each = [{name: value} for name, value in self._relaxed().items()]
        return each if len(each) < 2 else [*each, self._relaxed()]

    def _relaxed(self) -> dict[str, Any]:
        """Settings that cost time and nothing else."""
        changes: dict[str, Any] = {}
        if not self.config.may_offload:
            changes["enable_cpu_offload"] = True
        if self.config.max_num_batched_tokens is not None:
            changes["max_num_batched_tokens"] = None
        if self.config.expert_slots is not None:
            changes["expert_slots"] = None
        if self.config.max_num_seqs is None:  # nobody asked for more
            changes["max_num_seqs"] = 1
        return changes

    def _all_formats(self) -> Iterator[dict[str, Any]]:
        """Yield the changes of formats that save memory, with the least loss first."""
        quantization, head = self.config.quantization, {"head_quantization": "int8"}
        weights = _WEIGHTS
        if not self.packs:
            weights = ({},)
        elif quantization is not None:
            weights = ({}, head, *(_WEIGHTS[3:] if quantization in ("int8", "fp8") else ()))
        elif self._outcome(replace(self.config, **_WEIGHTS[1])) is None:  # the checkpoint is quantised
            weights = ({}, head)
        heads = self.config.head_quantization is None
        kv = _KV if self.config.kv_cache_dtype == "auto" else _KV[:1]
        for one in weights:
            for other in kv:
                if (one or other) and (heads or "head_quantization" not in one):
                    yield one | other

    def _outcome(self, config: EngineConfig) -> Outcome | None:
        if _SHARES.get(config.quantization, 0) * self.wide_bytes > self.memory_bytes:  # counting them takes time
            return None
        try:
            return self.step(config)
        except ValueError:
            return None

    def _propose(self, changes: dict[str, Any]) -> Proposal | None:
        config = replace(self.config, **changes)
        outcome = self._outcome(config)
        if outcome is None or not outcome.fits:
            return None
        if config.max_model_len is None and outcome.context < self.context:  # then it says so
            return self._propose(changes | {"max_model_len": outcome.context})
        if config.max_num_batched_tokens is None and self.config.max_num_batched_tokens is not None:
            # Steps of a size that is given have graphs for up to the whole of it, those that the engine chooses for up
            # to a fourth: a smaller size may be what fits.
            tokens = outcome.memory.max_num_batched_tokens
            smaller = (replace(config, max_num_batched_tokens=size) for size in (tokens, tokens // 2, tokens // 4))
            tried = ((other, self._outcome(other)) for other in smaller)
            config, outcome = next((one for one in tried if one[1] is not None and one[1].fits), (config, None))
            if outcome is None:
                return None
        changes = _changes(self.config, config)
        return Proposal(
            what=in_words(changes),
            changes=changes,
            memory_bytes=outcome.memory.total_bytes,
            streamed_bytes_per_step=outcome.streamed_bytes_per_step,
            ms_per_token=outcome.ms_per_token,
            is_floor=outcome.is_floor,
            command=command(config),
        )


def _changes(before: EngineConfig, after: EngineConfig) -> dict[str, Any]:
    was = asdict(before)
    return {name: value for name, value in asdict(after).items() if value != was[name]}


def fastest_format(proposals: Iterable[Proposal]) -> Proposal | None:
    """Return what a model that goes by its bare name is read in: of proposals that change how weights are read, and
    nothing else, the fastest, and of equally fast ones the one that loses least; None where there is none."""
    formats = [one for one in proposals if one.changes.keys() <= {"quantization", "head_quantization"}]
    return min(formats, key=lambda one: one.ms_per_token or 0.0, default=None)


def in_words(changes: dict[str, Any]) -> str:
    """Return changed settings as a report names them: "weights in int4, KV in fp8"."""
    said = {one: _SAID.get(one) or one[1] is not None and _WORDS[one[0]].format(one[1]) for one in changes.items()}
    return ", ".join(filter(None, said.values()))


def command(config: EngineConfig) -> str:
    """Return the command that serves this config; of a shape that no checkpoint has, the command that plans it."""
    model, settings = str(config.model), asdict(config)
    if model in SHAPES:
        model = checkpoint_named(model) or model
    if model not in SHAPES:
        return shlex.join(["nanoinfer", "serve", model, *option_words(settings, {"enable_cpu_offload": "auto"})])
    batch = settings.pop("max_num_seqs")
    options = option_words(settings, {"enable_cpu_offload": "auto"})
    return shlex.join(["nanoinfer", "plan", model, *(["--batch", str(batch)] if batch else []), *options])
