"""The results of the runs, in words."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Mismatch:
    """The first difference of an answer to one request.

    Attributes:
        request: number of the request, from 0.
        position: number of the generated token, from 0; None if the request as a whole differs.
        text: both values, in words.
    """

    request: int
    position: int | None
    text: str

    def __str__(self) -> str:
        place = "" if self.position is None else f", generated token {self.position}"
        return f"request {self.request}{place}: {self.text}"


@dataclass(kw_only=True)
class RunReport:
    """The report of one run.

    Attributes:
        what: what the run does.
        is_reference: True for the first run with a result; all other runs are compared with it.
        facts: what happened in the run: bytes streamed, blocks that stayed, switches.
        left_out: why the run was left out, or why it does not count.
        failure: the error that ended the run.
        num_tokens, num_logits: how many were compared with the reference, or produced by the reference.
        largest_difference: of a logit, as a share of its row's largest logit; 0 if all bits are equal.
    """

    name: str
    what: str
    is_reference: bool = False
    facts: list[str] = field(default_factory=list)
    left_out: str | None = None
    failure: str | None = None
    mismatches: list[Mismatch] = field(default_factory=list)
    num_tokens: int = 0
    num_logits: int = 0
    largest_difference: float = 0.0

    @property
    def is_wrong(self) -> bool:
        return self.failure is not None or bool(self.mismatches)

    def result(self, is_exact: bool) -> str:
        if self.left_out is not None:
            return f"left out: {self.left_out}"
        if self.failure is not None:
            return f"FAILED: {self.failure}"
        if self.mismatches:
            return "DIFFERENT"
        if self.is_reference:
            return "the reference"
        return "identical" if is_exact else f"equal to rounding (up to {self.largest_difference:.1e} of the largest)"

    def lines(self, is_exact: bool) -> list[str]:
        """Return the lines of the run in the report: its result, what happened, and each difference."""
        lines = [f"{self.name:<10}{self.what}: {self.result(is_exact)}"]
        if self.facts and self.left_out is None:
            lines.append(f"{'':<10}{', '.join(self.facts)}")
        return lines + [f"{'':<10}{mismatch}" for mismatch in self.mismatches]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """All runs, and the conclusion.

    Attributes:
        setting: the lines that describe model, requests and conditions.
        is_exact: whether bits were compared; False if the attention backend has no fixed splits.
    """

    setting: list[str]
    runs: list[RunReport]
    is_exact: bool

    @property
    def is_identical(self) -> bool:
        return not any(run.is_wrong for run in self.runs)

    def line(self) -> str:
        """Return the verdict in one line."""
        wrong = [run.name for run in self.runs if run.is_wrong]
        if wrong:
            return f"DIFFERENT in {', '.join(wrong)}"
        done = [run for run in self.runs if run.left_out is None]
        compared = [run for run in done if not run.is_reference]
        left_out = [run.name for run in self.runs if run.left_out is not None]
        how = "identical" if self.is_exact else "equal to rounding"
        line = (
            f"{how}: {sum(run.num_tokens for run in compared):,} tokens and "
            f"{sum(run.num_logits for run in compared):,} logits in {len(done)} runs"
        )
        return f"{line} (left out: {', '.join(left_out)})" if left_out else line

    def report(self) -> str:
        """Return the whole report: what was compared, each run, each difference, and the verdict as the last line."""
        lines = [*self.setting, ""]
        for run in self.runs:
            lines += run.lines(self.is_exact)
        return "\n".join([*lines, "", self.line()])
