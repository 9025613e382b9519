"""What the reference sampler reads for one step: a row per sequence, as tensors beside the logits."""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from nanoinfer.sampling.limits import TokenLimits, line_type
from nanoinfer.sampling_params import GREEDY_TEMPERATURE, SamplingParams

MAX_BANNED = 64
"""Most tokens that may be banned from a row until it has `min_tokens`."""
MAX_COUNT = torch.iinfo(torch.int16).max
"""Largest count of a token in a row's output. Further occurrences are not counted."""
UNSOUND = -1
"""In place of a token: a logit of the row was NaN or infinity, or all were -infinity, so no token can be drawn."""
NOTHING_LEFT = -2
"""In place of a token: what is banned from the row, or not allowed there, is every token that is not -infinity."""
ROW = np.dtype(
    [
        ("seed", np.int64),  # the 64 bits of the unsigned seed
        ("step", np.int64),  # tokens sampled so far
        ("row", np.int32),  # where a line of an upload belongs
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("top_k", np.int32),
        ("is_counted", np.int32),  # 1: it matters how often each token was generated
        ("banned_until", np.int32),  # before this step, the first num_banned of banned_ids are banned
        ("num_banned", np.int32),
        ("is_masked", np.int32),  # 1: the mask of allowed tokens counts; see `nanoinfer.sampling.limits`
        ("num_listed", np.int32),  # tokens with a slot
        ("num_bad_tokens", np.int32),  # see `TokenLimits.num_bad_tokens`
        ("banned_ids", np.int32, MAX_BANNED),
    ],
    align=True,
)
"""A row's settings as they lie on the device, the one declaration for upload, reference and kernels."""
ROW_WORDS = ROW.itemsize // 4
# Tokens in a tile. A vocabulary of 150,000 has 74 tiles: with two rows, these are enough programs to fill a GPU.
TILE_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """How one row is sampled in one step. The defaults are for padding rows: greedy, without further work."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    """The sequence's own seed, in [0, 2^64)."""
    step: int = 0
    """Tokens that the sequence generated before this one, unread ones included."""
    penalty_token_ids: Collection[int] = ()
    """Tokens in prompt and output; read only with a repetition penalty. A set is best, repeats only cost time."""
    output_token_ids: Collection[int] = ()
    """Generated tokens, each as often as it came; read only where `counts_output`."""
    banned_token_ids: Collection[int] = ()
    """Tokens that must not come in the first `min_tokens` steps: end token and stop_token_ids."""
    min_tokens: int = 0
    limits: TokenLimits | None = None
    """logit_bias, allowed_token_ids and bad_words; None: none of them."""

    @classmethod
    def from_params(
        cls, params: SamplingParams, *, seed: int, step: int, end_token_ids: Collection[int] = (), **own: Any
    ) -> "RowSampling":
        """Return a row from a request's params.

        seed: of the sequence, in [0, 2^64); `params.seed` where given (completions of one request need different ones).
        end_token_ids: everything that would end the sequence: the model's end tokens and `params.stop_token_ids`.
        own: what else is not the params', such as the row's tokens.
        """
        shared = {name: value for name, value in vars(params).items() if name in cls.__dataclass_fields__}
        banned = end_token_ids if step < params.min_tokens else ()
        return cls(**shared | own | dict(seed=seed, step=step, banned_token_ids=banned))

    @property
    def counts_output(self) -> bool:
        """Whether it matters how often each token was generated."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


@lru_cache
def _views(line: np.dtype) -> dict[str, tuple[torch.dtype, int | None, int]]:
    """Return of each field: its type, its length if it has one, and where it begins in a line of that type."""
    return {
        name: (getattr(torch, dtype.base.name), dtype.shape[0] if dtype.shape else None, offset // dtype.base.itemsize)
        for name, (dtype, offset) in line.fields.items()
    }


@dataclass(frozen=True)
class SettingsTable:
    """Lines of rows, words: [rows, words of a line] int32. `table["top_p"]` is a view of that field: [rows].

    line: what a line holds.
    """

    words: torch.Tensor
    line: np.dtype = field(default=ROW)

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, length, begin = _views(self.line)[name]
        values = self.words.view(dtype)
        return values.select(1, begin) if length is None else values.narrow(1, begin, length)


def limits_table(words: torch.Tensor, vocab_size: int) -> SettingsTable:
    """Return the table of which `words` holds the lines, [rows, line_words] int32: what rows may draw."""
    return SettingsTable(words, line_type(vocab_size))


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """The rows of one step, B of them, as tensors beside the logits."""

    vocab_size: int
    settings: SettingsTable  # of the B rows
    penalty_rows: torch.Tensor  # [P] int64: rows with a repetition penalty
    seen: torch.Tensor  # [P, vocab_size] bool: the tokens in their prompts and outputs
    counted_rows: torch.Tensor  # [C] int64: rows with a presence or frequency penalty
    counts: torch.Tensor  # [C, vocab_size] int16: how often each token is in their outputs
    banned_rows: torch.Tensor  # [N] int64: row banned_rows[i] may not take banned_ids[i] in this step
    banned_ids: torch.Tensor  # [N] int64
    limited_rows: torch.Tensor  # [L] int64: rows with limits
    limits: SettingsTable  # of these rows

    @cached_property
    def is_greedy(self) -> torch.Tensor:
        """[B] bool."""
        return self.settings["temperature"] < GREEDY_TEMPERATURE

    @property
    def is_narrowed(self) -> torch.Tensor:
        """[B] bool: whether some token may be banned or not allowed."""
        narrowed = torch.zeros_like(self.is_greedy)
        narrowed[self.banned_rows] = True
        narrowed[self.limited_rows] = True
        return narrowed

    @property
    def min_p_rows(self) -> torch.Tensor:
        """[M] int64: random rows with a min_p."""
        return (~self.is_greedy & (self.settings["min_p"] > 0)).nonzero()[:, 0]

    @property
    def sort_rows(self) -> torch.Tensor:
        """[S] int64: random rows with a top_k or top_p, the only ones that are sorted."""
        top_k, top_p = self.settings["top_k"], self.settings["top_p"]
        has_top_k = (top_k > 0) & (top_k < self.vocab_size)
        return (~self.is_greedy & (has_top_k | (top_p < 1))).nonzero()[:, 0]
