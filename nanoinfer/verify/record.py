"""The compared results: tokens, and the logits they were chosen from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanoinfer.verify.report import Mismatch, RunReport


@dataclass(frozen=True)
class Answer:
    """A completion of request `request`: token ids, and the logits of each token, [vocab_size] float32 on the CPU."""

    request: int
    tokens: list[int]
    logits: list[torch.Tensor]


def compare(reference: list[Answer], found: list[Answer], report: RunReport, tolerance: float | None) -> None:
    """Notes in the report how much was compared and the first difference of each answer.

    Args:
        reference: at least one answer to each request; the first one counts.
        tolerance: None compares bits. A number allows logits to differ by this share of the row's largest logit. If
            such a difference leads to another token, the comparison of the answer ends there without a mismatch.
    """
    first = {answer.request: answer for answer in reversed(reference)}
    for answer in found:
        wanted, got = first[answer.request].tokens, answer.tokens
        wanted_rows, got_rows = first[answer.request].logits, answer.logits
        if not len(wanted) == len(got) == len(got_rows):
            text = f"{len(got)} tokens with {len(got_rows)} rows of logits instead of {len(wanted)} tokens"
            report.mismatches.append(Mismatch(request=answer.request, position=None, text=text))
            continue
        for position, row in enumerate(got_rows):
            report.num_tokens += 1
            report.num_logits += row.numel()
            text = _difference(wanted_rows[position], row, report, tolerance)
            if text is None and wanted[position] != got[position]:
                if tolerance is not None:
                    break  # two tokens were nearly tied; all later tokens have a different context
                text = "the logits are equal"
            if text is not None:
                if wanted[position] != got[position]:
                    text = f"token {got[position]} instead of {wanted[position]}; {text}"
                report.mismatches.append(Mismatch(request=answer.request, position=position, text=text))
                break


def _difference(wanted: torch.Tensor, got: torch.Tensor, report: RunReport, tolerance: float | None) -> str | None:
    """Say what is wrong with a row of logits, [vocab_size] float32; None if nothing is."""
    broken = torch.nonzero(~torch.isfinite(got))
    if len(broken):
        advice = "; the reference itself: try another dtype, or memory was read after it was freed"
        return (
            f"logit of token {int(broken[0])} is {float(got[broken[0]])}, {len(broken)} of {got.numel()} logits are "
            f"not finite{advice if got is wanted else ''}"
        )
    is_different = wanted.view(torch.int32) != got.view(torch.int32)
    if not is_different.any():
        return None
    distance = (got - wanted).abs().nan_to_num(nan=torch.inf)
    place = int((distance + is_different).argmax())
    share = float(distance.max() / wanted.abs().max())
    report.largest_difference = max(report.largest_difference, share)
    if tolerance is not None and share <= tolerance:
        return None
    return (
        f"logit of token {place} is {float(got[place])!r} instead of {float(wanted[place])!r}, "
        f"{int(is_different.sum())} of {got.numel()} logits differ"
    )
