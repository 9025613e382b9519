"""Accuracy over length and depth as a table and as a picture."""

from __future__ import annotations

from pathlib import Path

from nanoinfer.measure.answers import largest_error
from nanoinfer.measure.report import paragraph, table
from nanoinfer.recall.answers import NUM_LOGPROBS
from nanoinfer.recall.evaluate import Grid, Scores


def figures(results: dict[str, Scores], grid: Grid) -> dict:
    """Return all figures, for the report and for JSON.

    equal_answers: number of those that are the first mode's, word for word; largest_logprob_error: against the first
    mode, by length, see `largest_error`, None: nothing to compare, as for the first mode itself; streamed_bytes: by
    length.
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
                "equal_answers": sum(a == b for a, b in zip(scores.answers, first.answers, strict=True)),
                "largest_logprob_error": [
                    None if scores is first else largest_error(*probes)
                    for probes in zip(scores.probes, first.probes, strict=True)
                ],
                "streamed_bytes": scores.streamed_bytes,
            }
            for name, scores in results.items()
        },
    }


def report(figures: dict, divergences: dict[str, float], num_tokens: int) -> str:
    """Return `figures` in words: a line for each mode and length, a column for each depth; and what tells modes apart.

    For each mode but the first a sentence says whether it gave the first one's answers. divergences: of formats of
    weights over `num_tokens` tokens, by name.
    """
    results = figures["results"]
    keys = ("accuracy", "largest_logprob_error", "streamed_bytes")
    rows = [
        dict(mode=name, tokens=length, accuracy=accuracy, error=error, streamed=streamed)
        for name, scores in results.items()
        for length, accuracy, error, streamed in zip(figures["lengths"], *map(scores.get, keys), strict=True)
    ]
    depths = [(f"at {depth:.0%}", f"{{accuracy[{i}]:.2f}}") for i, depth in enumerate(figures["depths"])]
    ends = [("log-prob error", "{error:.4f}"), ("streamed MB", "{streamed!M:,.1f}")]
    lines = [table(rows, [("mode", "{mode}"), ("tokens", "{tokens:,}"), *depths, *ends])]
    (first, wanted), *others = results.items()
    lines.append(
        f"share of right answers by depth of the fact, {figures['questions_per_cell']} questions a cell; log-prob "
        f"error: the largest difference from {first}'s among the {NUM_LOGPROBS} likeliest tokens at each place of the "
        "first document's answers; streamed: KV read from host memory"
    )
    for name, scores in others:
        same = f"{scores['equal_answers']} of {figures['questions']} answers equal"
        cells = "every cell equal" if scores["accuracy"] == wanted["accuracy"] else "CELLS DIFFER"
        lines.append(f"{name} against {first}: {same}, {cells}")
    if divergences:
        title = (
            "mean KL divergence of the next token's distribution from that of the checkpoint as it is, in nats, over "
            f"{num_tokens:,} tokens of the shortest contexts, in float32"
        )
        lines.append(paragraph(title, {name: f"{value:.2e}" for name, value in divergences.items()}, {}))
    return "\n".join(lines)


def plot(path: str | Path, figures: dict) -> None:
    """Draw `figures`: a heat map for each mode, lengths to the right, depths downwards."""
    from matplotlib.figure import Figure

    lengths = [f"{length // 1024}k" if length % 1024 == 0 else str(length) for length in figures["lengths"]]
    results, depths = figures["results"], figures["depths"]
    figure = Figure(figsize=((1.6 + 0.75 * len(lengths)) * len(results), 1.4 + 0.5 * len(depths)))
    all_axes = figure.subplots(1, len(results), squeeze=False)[0]
    for axes, (name, scores) in zip(all_axes, results.items(), strict=True):
        cells = [list(column) for column in zip(*scores["accuracy"], strict=True)]
        axes.imshow(cells, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for y, row in enumerate(cells):
            for x, value in enumerate(row):
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8)
        axes.set_title(name, fontsize=10)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        axes.set(xlabel="tokens", ylabel="depth of the fact")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
