"""The sampling settings of each row, on the device for the row's whole life: a step uploads only what changed."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Several

import numpy as np
import torch

from nanoinfer.execution.tables import RowState
from nanoinfer.sampling.limits import TokenLimits, line_words
from nanoinfer.sampling.reference import sampling_workspace
from nanoinfer.sampling.settings import MAX_COUNT, ROW, ROW_WORDS, RowSampling, SettingsTable, limits_table
from offload import Runtime, Staging, Stream

_FLOAT32 = torch.finfo(torch.float32)
# Rows of one step whose limits differ, before the host waits for the upload of the first.
_LIMITS_AT_ONCE = 4


class SamplingState:
    """The rows' sampling settings and what sampling changes: the number of sampled tokens and the set of seen ones.

    Row r of every tensor belongs to row r of `RowState`; the last one is for padding, and greedy.

    Args:
        max_batch: largest padded batch.

    Attributes:
        rows: the rows' other state.
        settings: of each row, and how many tokens it has sampled.
        seen: [rows, vocab_size / 32] int32, a bit per token of prompt and output; kept only with a repetition penalty.
        counts: [rows, vocab_size] int16, how often each token is in the output, up to `MAX_COUNT`; kept only with a
            presence or frequency penalty.
        limits: of each row, which tokens it may draw; kept only where it has `RowSampling.limits`.
        space: what the kernels pass to each other.
    """

    def __init__(self, runtime: Runtime, rows: RowState, vocab_size: int, max_batch: int) -> None:
        num_rows, device = len(rows.token), runtime.device
        self.vocab_size, self.rows = vocab_size, rows
        lines = self._lines([(0, RowSampling())]).repeat(num_rows, axis=0)
        lines.view(ROW)["row"] = np.arange(num_rows)[:, None]
        self.settings = SettingsTable(torch.tensor(lines, device=device))
        self.seen = torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self.counts = torch.zeros(num_rows, vocab_size, dtype=torch.int16, device=device)
        self._updates = torch.zeros(self.settings.words.shape, dtype=torch.int32, device=device)
        self._staging = Staging(runtime, num_rows * ROW_WORDS, torch.int32)
        self._seen_updates = torch.zeros(self.seen.shape, dtype=torch.int32, device=device)
        self._seen_staging = Staging(runtime, self.seen.numel(), torch.int32)
        self._counts_staging = Staging(runtime, vocab_size, torch.int16)  # for one row: pinned memory is expensive
        words = line_words(vocab_size)
        self.limits = limits_table(torch.zeros(num_rows, words, dtype=torch.int32, device=device), vocab_size)
        self._limits_staging = Staging(runtime, words, torch.int32, depth=_LIMITS_AT_ONCE)
        self.space = sampling_workspace(max_batch, vocab_size, device)

    def update(self, stream: Stream, settings: Several[tuple[int, RowSampling]]) -> None:
        """Upload settings, each with its row, for all work enqueued on `stream` from here on."""
        if not settings:
            return
        lines = self._lines(settings)
        self._staging.acquire().numpy()[: lines.size] = lines.reshape(-1)
        uploaded = self._updates[: len(lines)]
        self._staging.upload(stream, uploaded.view(-1))
        stream.run(lambda: self.settings.words.index_copy_(0, SettingsTable(uploaded)["row"].long(), uploaded))
        penalised = [(row, own.penalty_token_ids) for row, own in settings if own.repetition_penalty != 1]
        if penalised:
            self._upload_seen(stream, penalised)
        for row, own in settings:
            if own.counts_output:
                self._upload_counts(stream, self.counts[row], own.output_token_ids)
        self._upload_limits(stream, settings)

    def _upload_seen(self, stream: Stream, seen: list[tuple[int, Collection[int]]]) -> None:
        bits = np.zeros((len(seen), self.seen.shape[1] * 32), dtype=np.uint8)
        for line, (_, token_ids) in zip(bits, seen, strict=True):
            line[list(token_ids)] = 1
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self._seen_staging.acquire().numpy()[: words.size] = words.reshape(-1)
        uploaded = self._seen_updates[: len(seen)]
        self._seen_staging.upload(stream, uploaded.view(-1))
        rows = [row for row, _ in seen]  # one copy per row: there are few, and rarely
        stream.run(lambda: [self.seen[row].copy_(line) for row, line in zip(rows, uploaded, strict=True)])

    def _upload_counts(self, stream: Stream, counts: torch.Tensor, output_token_ids: Collection[int]) -> None:
        if not output_token_ids:
            stream.run(counts.zero_)
            return
        # Preempted sequences and guesses under penalties come here: the third of a step may wait for the first upload.
        counted = np.bincount(list(output_token_ids), minlength=self.vocab_size)
        np.minimum(counted, MAX_COUNT, out=self._counts_staging.acquire().numpy(), casting="unsafe")
        self._counts_staging.upload(stream, counts)

    def _upload_limits(self, stream: Stream, settings: Several[tuple[int, RowSampling]]) -> None:
        """Upload the lines of rows with limits: one line for all rows for which it is the same."""
        rows_of: dict[tuple[TokenLimits, tuple[int, ...]], list[int]] = {}
        for row, own in settings:
            if own.limits is not None:
                rows_of.setdefault((own.limits, tuple(own.output_token_ids)), []).append(row)
        for (limits, output), (first, *others) in rows_of.items():
            self._limits_staging.acquire().numpy()[:] = limits.line(self.vocab_size, output)
            lines = self.limits.words
            self._limits_staging.upload(stream, lines[first])
            for row in others:
                stream.copy(lines[row], lines[first])

    def _lines(self, settings: Several[tuple[int, RowSampling]]) -> np.ndarray:
        """Return settings, each with its row, as the table holds them: [n, ROW_WORDS] int32."""
        lines = np.zeros(len(settings), dtype=ROW)
        for line, (row, own) in zip(lines, settings, strict=True):
            # A stop token id beyond the vocabulary can never come, so there is nothing to ban.
            banned = sorted(token_id for token_id in own.banned_token_ids if token_id < self.vocab_size)
            line["row"], line["step"] = row, own.step
            line["seed"] = np.uint64(own.seed).view(np.int64)
            line["temperature"] = min(own.temperature, _FLOAT32.max)  # an infinite one would give -inf / inf
            line["repetition_penalty"] = min(max(own.repetition_penalty, _FLOAT32.tiny), _FLOAT32.max)
            for name in ("top_p", "min_p", "presence_penalty", "frequency_penalty"):
                line[name] = getattr(own, name)
            line["top_k"] = min(own.top_k, self.vocab_size)
            line["is_counted"] = own.counts_output
            line["banned_until"] = min(own.min_tokens, 2**31 - 1) if banned else 0
            line["num_banned"] = len(banned)
            line["banned_ids"][: len(banned)] = banned
            if (limits := own.limits) is not None:
                line["is_masked"], line["num_listed"] = limits.is_masked, len(limits.listed)
                line["num_bad_tokens"] = limits.num_bad_tokens
        return lines.view(np.int32).reshape(len(lines), ROW_WORDS)

    def sample(self, logits: torch.Tensor, batch_rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Sample the next token of each row, on the current stream; may be captured in a CUDA graph.

        logits: [B, vocab_size], any float type, not changed; batch_rows: [B] int32; tokens: [B] int64, out, also
        written to `RowState.token`. The rows' lengths are incremented, except the padding row's.
        """
        self.rows.operations.sample_rows(logits, batch_rows, self, tokens)
