"""Accuracy over length and depth as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from nanoinfer.measure.report import paragraph
from nanoinfer.recall.answers import NUM_LOGPROBS, largest_error
from nanoinfer.recall.evaluate import Grid, Scores


def table(results: dict[str, Scores], grid: Grid) -> str:
    """One line for each mode and length, one column for each depth, and what else tells modes apart."""
    width = max(len("mode"), *map(len, results))
    head = f"{'mode':<{width}}  {'tokens':>7}  " + "  ".join(f"{depth:>5.0%}" for depth in grid.depths)
    head += "  log-prob error  streamed MB"
    lines = [f"{'':<{width}}  {'':>7}  depth of the fact", head, "-" * len(head)]
    first, wanted = next(iter(results.items()))
    for name, scores in results.items():
        errors = _errors(scores, wanted)
        for row, length in enumerate(grid.lengths):
            cells = "  ".join(f"{value:>5.2f}" for value in scores.accuracy[row])
            error = "-" if errors[row] is None else f"{errors[row]:.4f}"
            streamed = scores.streamed_bytes[row] / 1e6
            lines.append(f"{name:<{width}}  {length:>7,}  {cells}  {error:>14}  {streamed:>11,.1f}")
    lines.append(
        f"share of right answers, {grid.num_questions} questions a cell; log-prob error: the largest difference from "
        f"{first}'s among the {NUM_LOGPROBS} likeliest tokens at each place of the first document's answers; streamed: "
        "KV read from host memory"
    )
    return "\n".join(lines)


def compare(results: dict[str, Scores]) -> list[str]:
    """A sentence for each mode but the first: whether it gave the first one's answers."""
    (first, wanted), *others = results.items()
    lines = []
    for name, scores in others:
        same = _same_answers(scores, wanted)
        cells = "every cell equal" if scores.right == wanted.right else "CELLS DIFFER"
        lines.append(f"{name} against {first}: {same} of {len(wanted.answers)} answers equal, {cells}")
    return lines


def compare_formats(divergences: dict[str, float], prompts: list[list[int]]) -> list[str]:
    """A line for each format of weights under a title: how far it moves the model's distributions."""
    if not divergences:
        return []
    title = (
        "mean KL divergence of the next token's distribution from that of the checkpoint as it is, in nats, over "
        f"{sum(map(len, prompts)):,} tokens of the shortest contexts, in float32"
    )
    return [paragraph(title, [(name, f"{value:.2e}") for name, value in divergences.items()])]


def _same_answers(scores: Scores, wanted: Scores) -> int:
    return sum(a == b for a, b in zip(scores.answers, wanted.answers, strict=True))


def _errors(scores: Scores, wanted: Scores) -> list[float | None]:
    """Of each length the largest error of a log-probability; None: nothing to compare, as for the first mode itself."""
    if scores is wanted:
        return [None] * len(scores.right)
    return [largest_error(*probes) for probes in zip(scores.probes, wanted.probes, strict=True)]


def figures(results: dict[str, Scores], grid: Grid) -> dict:
    """For JSON.

    equal_answers: number of those that are the first mode's, word for word; largest_logprob_error: against the first
    mode, by length, see `largest_error`; streamed_bytes: by length.
    """
    first = next(iter(results.values()))
    return {
        "lengths": list(grid.lengths),
        "depths": list(grid.depths),
        "seed": grid.seed,
        "questions": grid.num_asked,
        "questions_per_cell": grid.num_questions,
        "results": {
            name: {
                "accuracy": scores.accuracy,
                "lowest": scores.lowest,
                "equal_answers": _same_answers(scores, first),
                "largest_logprob_error": _errors(scores, first),
                "streamed_bytes": scores.streamed_bytes,
            }
            for name, scores in results.items()
        },
    }


def plot(path: str | Path, results: dict[str, Scores], grid: Grid) -> None:
    """A heat map for each mode: lengths to the right, depths downwards."""
    from matplotlib.figure import Figure

    lengths = [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in grid.lengths]
    size = (1.6 + 0.75 * len(grid.lengths)) * len(results), 1.4 + 0.5 * len(grid.depths)
    figure = Figure(figsize=size)
    all_axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, scores) in zip(all_axes, results.items(), strict=True):
        cells = [list(column) for column in zip(*scores.accuracy, strict=True)]
        axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, row in enumerate(cells):
            for x, value in enumerate(row):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(grid.depths)), [f"{depth:.0%}" for depth in grid.depths])
        axes.set(xlabel="tokens", ylabel="depth of the fact")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
