"""What the sampler reads for one step: a row per sequence, as tensors beside the logits."""

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from nanoinfer.sampling_params import GREEDY_TEMPERATURE, SamplingParams

_FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """How one row is sampled in one step. The defaults are greedy and need no work, as padding rows want it."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """The sequence's own seed, in [0, 2^64)."""
    step: int = 0
    """Tokens that the sequence generated before this one, unread ones included."""
    penalty_token_ids: Collection[int] = ()
    """Tokens in prompt and output; read only with a repetition penalty. A set is best, repeats only cost time."""
    banned_token_ids: Collection[int] = ()
    """Tokens that must not come in the first `min_tokens` steps: end token and stop_token_ids."""
    min_tokens: int = 0

    @classmethod
    def from_params(
        cls,
        params: SamplingParams,
        *,
        seed: int,
        step: int,
        penalty_token_ids: Collection[int] = (),
        end_token_ids: Collection[int] = (),
    ) -> "RowSampling":
        """A row from a request's params.

        seed: of the sequence, in [0, 2^64); `params.seed` where given (completions of one request need different ones).
        end_token_ids: everything that would end the sequence: the model's end tokens and `params.stop_token_ids`.
        """
        return cls(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            seed=seed,
            step=step,
            penalty_token_ids=penalty_token_ids if params.repetition_penalty != 1 else (),
            banned_token_ids=end_token_ids if step < params.min_tokens else (),
            min_tokens=params.min_tokens,
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """The rows of one step, B of them. Tensors lie on the logits' device, tuples and flags on the host."""

    vocab_size: int
    temperature: torch.Tensor  # [B] float32
    top_p: torch.Tensor  # [B] float32
    min_p: torch.Tensor  # [B] float32
    repetition_penalty: torch.Tensor  # [B] float32
    top_k: torch.Tensor  # [B] int64
    seed: torch.Tensor  # [B] int64, the 64 bits of the unsigned seed
    step: torch.Tensor  # [B] int64
    penalty_rows: torch.Tensor  # [P] int64: token penalty_ids[i] was seen in row penalty_rows[i]
    penalty_ids: torch.Tensor  # [P] int64
    banned_rows: torch.Tensor  # [N] int64: row banned_rows[i] may not take banned_ids[i] before step banned_until[i]
    banned_ids: torch.Tensor  # [N] int64
    banned_until: torch.Tensor  # [N] int64
    min_p_rows: torch.Tensor  # [M] int64: random rows with a min_p
    sort_rows: torch.Tensor  # [S] int64: random rows with a top_k or top_p, the only ones that are sorted
    penalised_rows: tuple[int, ...]
    all_greedy: bool
    any_greedy: bool

    @classmethod
    def build(cls, rows: Sequence[RowSampling], device: torch.device | str, vocab_size: int) -> "SamplingBatch":
        """Uploads the rows, in two copies that do not wait where the device is CUDA (on the current stream)."""
        device = torch.device(device)
        floats = [
            [min(row.temperature, _FLOAT32.max) for row in rows],  # an infinite one would give -inf / inf
            [row.top_p for row in rows],
            [row.min_p for row in rows],
            [min(max(row.repetition_penalty, _FLOAT32.tiny), _FLOAT32.max) for row in rows],
        ]
        penalised = tuple(i for i, row in enumerate(rows) if row.repetition_penalty != 1)
        penalties = [(i, token_id) for i in penalised for token_id in rows[i].penalty_token_ids]
        # A stop token id beyond the vocabulary can never come, so there is nothing to ban.
        bans = [
            (i, token_id, row.min_tokens)
            for i, row in enumerate(rows)
            if row.step < row.min_tokens
            for token_id in row.banned_token_ids
            if token_id < vocab_size
        ]
        assert all(0 <= token_id < vocab_size for _, token_id in penalties), "a seen token is outside the vocabulary"
        integers = [
            [row.top_k for row in rows],
            [row.seed - 2**64 if row.seed >= 2**63 else row.seed for row in rows],
            [row.step for row in rows],
            [row for row, _ in penalties],
            [token_id for _, token_id in penalties],
            [row for row, _, _ in bans],
            [token_id for _, token_id, _ in bans],
            [until for _, _, until in bans],
            [i for i, row in enumerate(rows) if not row.is_greedy and row.min_p > 0],
            [i for i, row in enumerate(rows) if not row.is_greedy and (0 < row.top_k < vocab_size or row.top_p < 1)],
        ]
        temperature, top_p, min_p, repetition_penalty = _upload(floats, torch.float32, device)
        (top_k, seed, step, penalty_rows, penalty_ids, banned_rows, banned_ids, banned_until, min_p_rows, sort_rows) = (
            _upload(integers, torch.int64, device)
        )
        return cls(
            vocab_size=vocab_size,
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            top_k=top_k,
            seed=seed,
            step=step,
            penalty_rows=penalty_rows,
            penalty_ids=penalty_ids,
            banned_rows=banned_rows,
            banned_ids=banned_ids,
            banned_until=banned_until,
            min_p_rows=min_p_rows,
            sort_rows=sort_rows,
            penalised_rows=penalised,
            all_greedy=all(row.is_greedy for row in rows),
            any_greedy=any(row.is_greedy for row in rows),
        )

    @property
    def num_rows(self) -> int:
        return self.temperature.shape[0]

    @property
    def needs_sort(self) -> bool:
        return self.sort_rows.shape[0] > 0

    @property
    def needs_penalty(self) -> bool:
        return self.penalty_ids.shape[0] > 0

    def with_unread_tokens(self, rows: Sequence[int], tokens: torch.Tensor) -> "SamplingBatch":
        """The batch with tokens that the host has not read yet and so left out of `penalty_token_ids`.

        tokens: [len(rows)] int64, on the device; tokens[i] was sampled for row rows[i].
        """
        assert tokens.shape == (len(rows),), f"{len(rows)} rows, but tokens have shape {tuple(tokens.shape)}"
        penalised = set(self.penalised_rows)
        wanted = [(i, row) for i, row in enumerate(rows) if row in penalised]
        if not wanted:
            return self
        index, row_ids = _upload([[i for i, _ in wanted], [row for _, row in wanted]], torch.int64, tokens.device)
        return dataclasses.replace(
            self,
            penalty_rows=torch.cat([self.penalty_rows, row_ids]),
            penalty_ids=torch.cat([self.penalty_ids, tokens[index]]),
        )

    def advance(self, tokens: torch.Tensor) -> "SamplingBatch":
        """The same rows in the next step, after `tokens` ([B] int64, on the device) were sampled; nothing is read."""
        batch = self.with_unread_tokens(range(self.num_rows), tokens)
        return dataclasses.replace(batch, step=batch.step + 1)


def _upload(parts: list[list], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Each part as a 1-D tensor, all in one copy."""
    flat = torch.tensor([value for part in parts for value in part], dtype=dtype)
    if device.type == "cuda":
        # The pinned allocator does not hand this memory out again before the copy has run.
        flat = flat.pin_memory().to(device, non_blocking=True)
    return flat.split([len(part) for part in parts])
