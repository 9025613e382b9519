"""What the runs gave, compared, and the results in words."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from nanoinfer.measure.answers import until_tokens_differ
from nanoinfer.measure.report import listed


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
        where = "" if self.position is None else f", generated token {self.position}"
        return f"request {self.request}{where}: {self.text}"


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

    def text(self, is_exact: bool) -> str:
        """Return what the report says of the run: its result, what happened, and each difference."""
        facts = [", ".join(self.facts)] if self.facts and self.left_out is None else []
        lines = [f"{self.what}: {self.result(is_exact)}", *facts, *map(str, self.mismatches)]
        return listed({self.name: "\n".join(lines)}, width=10)


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
        runs = [run.text(self.is_exact) for run in self.runs]
        return "\n".join([*self.setting, "", *runs, "", self.line()])


@dataclass(frozen=True)
class Answer:
    """A completion of request `request`: token ids, and the logits of each token, [vocab_size] float32 on the CPU."""

    request: int
    tokens: list[int]
    logits: list[torch.Tensor]


def compare(reference: list[Answer], answers: list[Answer], report: RunReport, tolerance: float | None) -> None:
    """Note in the report how much was compared and the first difference of each answer.

    Args:
        reference: at least one answer to each request; the first one counts.
        tolerance: None compares bits. A number allows logits to differ by this share of the row's largest logit. If
            such a difference leads to another token, the comparison of the answer ends there without a mismatch.
    """
    first = {answer.request: answer for answer in reversed(reference)}
    for answer in answers:
        wanted, got = first[answer.request].tokens, answer.tokens
        wanted_rows, got_rows = first[answer.request].logits, answer.logits
        if broken := _broken(got_rows, is_reference=answer is first[answer.request]):  # such a request ends early
            report.mismatches.append(Mismatch(request=answer.request, position=broken[0], text=broken[1]))
            continue
        if not len(wanted) == len(got) == len(got_rows):
            text = f"{len(got)} tokens with {len(got_rows)} rows of logits instead of {len(wanted)} tokens"
            report.mismatches.append(Mismatch(request=answer.request, position=None, text=text))
            continue
        for position in until_tokens_differ(wanted, got):
            report.num_tokens += 1
            report.num_logits += got_rows[position].numel()
            text = _difference(wanted_rows[position], got_rows[position], report, tolerance)
            if (
                text is None and wanted[position] != got[position] and tolerance is None
            ):  # else the two were nearly tied
                text = "the logits are equal"
            if text is not None:
                if wanted[position] != got[position]:
                    text = f"token {got[position]} instead of {wanted[position]}; {text}"
                report.mismatches.append(Mismatch(request=answer.request, position=position, text=text))
                break


def _broken(rows: list[torch.Tensor], is_reference: bool) -> tuple[int, str] | None:
    """Return the number of the first row with logits that are not finite, and what they are; None if there is none."""
    for position, row in enumerate(rows):
        broken = torch.nonzero(~torch.isfinite(row))
        if len(broken):
            advice = "; the reference itself: try another dtype, or memory was read after it was freed"
            return position, (
                f"logit of token {int(broken[0])} is {float(row[broken[0]])}, {len(broken)} of {row.numel()} logits "
                f"are not finite{advice if is_reference else ''}"
            )
    return None


def _difference(wanted: torch.Tensor, got: torch.Tensor, report: RunReport, tolerance: float | None) -> str | None:
    """Say what is wrong with a row of logits, [vocab_size] float32; None if nothing is."""
    is_different = wanted.view(torch.int32) != got.view(torch.int32)
    if not is_different.any():
        return None
    distance = (got - wanted).abs().nan_to_num(nan=torch.inf)
    token_id = int((distance + is_different).argmax())
    share = float(distance.max() / wanted.abs().max())
    report.largest_difference = max(report.largest_difference, share)
    if tolerance is not None and share <= tolerance:
        return None
    return (
        f"logit of token {token_id} is {float(got[token_id])!r} instead of {float(wanted[token_id])!r}, "
        f"{int(is_different.sum())} of {got.numel()} logits differ"
    )
