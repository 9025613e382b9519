"""Accuracy of the "recall" model: on training rows while it learns, and on documents by length and depth at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import recall_model
import torch
from recall_model import Past, Weights
from recall_rows import FORM
from recall_text import KINDS, Mix, Question, make_document, questions
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3Config

from nanoinfer.recall.text import Document

DEPTHS = [i / 10 for i in range(11)]
# Seeds of documents; rows are written from one generator and share no state with them.
FIRST_SEED = 10**9
# Questions that run at once behind one document; their scores over 64k tokens take 1 GB.
MAX_QUESTIONS = 16
# A document that is asked about each kind of fact has some of each, however short it is.
EVEN = Mix(pass_key=0.06, table=0.04, passage=0.04, count=0.06)


def rows_accuracy(right: np.ndarray, marks: np.ndarray, far: np.ndarray) -> dict[str, float]:
    """Share of answers of which each looked-up token is right, by kind, and for pass keys by distance.

    Args:
        right: whether each target was predicted, bool; marks, far: as in `recall_rows.Batch`, all [N], rows joined.
    """
    places = np.flatnonzero((marks > 0) & (marks < FORM))
    if not len(places):
        return {}
    starts = np.flatnonzero(np.diff(places, prepend=-2) > 1)
    whole = np.logical_and.reduceat(right[places], starts)
    kinds, distances = marks[places[starts]] - 1, far[places[starts]]
    found = {KINDS[kind]: float(whole[kinds == kind].mean()) for kind in np.unique(kinds)}
    for bits in np.unique(distances[kinds == 0]):
        found[f"pass_key, < {2 ** int(bits)} tokens"] = float(whole[(kinds == 0) & (distances == bits)].mean())
    return found


class Grid:
    """Asks a model about documents; greedy decoding, all answers at once.

    weights: of one dtype and device.
    """

    def __init__(self, weights: Weights, config: Qwen3Config, tokenizer: PreTrainedTokenizerBase) -> None:
        self._weights, self._config, self._tokenizer = weights, config, tokenizer
        self._device = weights["model.norm.weight"].device

    def pass_keys(self, length: int, per_cell: int, first_seed: int = FIRST_SEED) -> dict[str, list[int]]:
        """Depth -> [right, asked] over documents of `length` tokens, at least `per_cell` questions per depth."""
        at_once = max(1, min(4, length // 1024))
        found: dict[str, list[int]] = {f"{depth:.1f}": [0, 0] for depth in DEPTHS}
        for i in range(-(-per_cell // at_once)):
            depths = [depth for depth in DEPTHS for _ in range(at_once)]
            document = make_document(first_seed + i, length - 1, self._count, depths)
            for j, right in enumerate(self.right(document, questions(document))):
                cell = found[f"{DEPTHS[j // at_once]:.1f}"]
                cell[0] += right
                cell[1] += 1
        return found

    def kinds(self, length: int, documents: int, first_seed: int = FIRST_SEED + 10**6) -> dict[str, list[int]]:
        """Kind -> [right, asked], at all depths, of each document about as many questions of each kind."""
        found: dict[str, list[int]] = {kind: [0, 0] for kind in KINDS}
        for i in range(documents):
            document = make_document(first_seed + i, length - 1, self._count, mix=EVEN)
            of_kinds = [[one for one in questions(document, wished=False) if one.kind == kind] for kind in KINDS]
            asked = [one for of_kind in of_kinds for one in of_kind[:: max(1, len(of_kind) // 4)]]
            for question, right in zip(asked, self.right(document, asked)):
                found[question.kind][0] += right
                found[question.kind][1] += 1
        return found

    @torch.no_grad()
    def right(self, document: Document, questions: Sequence[Question]) -> list[bool]:
        """Whether greedy decoding gives each question's answer and ends there.

        Each token of the answer is predicted after the right ones before it: all of them are the likeliest exactly when
        greedy decoding writes the answer.
        """
        past: Past = []
        ids = torch.tensor([self._tokenizer.encode(document.text)], device=self._device)
        recall_model.forward(self._weights, self._config, ids, kept=past)
        groups: dict[tuple[int, int], list[tuple[int, list[int]]]] = defaultdict(list)
        for i, question in enumerate(questions):
            asked = self._ids(question.prompt_text[len(document.text) :])
            answer = [*self._ids(question.answer_text), self._tokenizer.eos_token_id]
            groups[len(asked), len(answer)].append((i, asked + answer))
        right = [False] * len(questions)
        for (num_asked, _), group in groups.items():
            for begin in range(0, len(group), MAX_QUESTIONS):
                part = group[begin : begin + MAX_QUESTIONS]
                rows = torch.tensor([row for _, row in part], device=self._device)
                for (i, _), ok in zip(part, self._follow(rows, num_asked, past)):
                    right[i] = ok
        return right

    def _follow(self, rows: Tensor, num_asked: int, past: Past) -> list[bool]:
        """Whether each row's tokens from `num_asked` on are the likeliest ones. rows: [B, T]."""
        hidden = recall_model.forward(self._weights, self._config, rows[:, :-1], past=past)
        likeliest = recall_model.logits(self._weights, hidden[:, num_asked - 1 :]).argmax(-1)
        return (likeliest == rows[:, num_asked:]).all(1).tolist()

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _count(self, text: str) -> int:
        return len(self._ids(text))


def table(grids: dict[str, dict[str, list[int]]]) -> str:
    """Length -> depth -> [right, asked] as a table in Markdown, in percent."""
    lines = ["| tokens | " + " | ".join(f"{depth:.1f}" for depth in DEPTHS) + " |", "| --- " * 12 + "|"]
    for length, cells in grids.items():
        lines.append(f"| {length} | " + " | ".join(f"{100 * a / b:.0f}" for a, b in cells.values()) + " |")
    return "\n".join(lines)
