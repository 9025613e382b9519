"""One request: its completions, when each of them ends, and what the user gets to see."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from nanoinfer.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput, StreamOutput
from nanoinfer.requests.detokenizer import Detokenizer, TokenTexts
from nanoinfer.requests.sequence import Sequence
from nanoinfer.sampling_params import SamplingParams


@dataclass
class Request:
    """A prompt with its `n` completions, each of which is a sequence.

    A completion that fails ends alone. The others go on to their own ends: what each holds must not depend on how far
    it had come when another one failed, which is another thing in a crowd.

    Attributes:
        token_texts: what log-probabilities show of a token.
        prompt_logprobs: of the prompt's tokens, as far as they are known; nothing but the first entry unless asked for.

    Times are in seconds of `time.perf_counter`; the arrival is also kept as Unix time (`arrival_time`).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    tokenizer: PreTrainedTokenizerBase | None
    end_token_ids: frozenset[int]
    token_texts: TokenTexts
    arrival: float = field(default_factory=time.perf_counter)
    arrival_time: float = field(default_factory=time.time)
    first_scheduled: float | None = None
    first_token: float | None = None  # read
    first_made: float | None = None
    last_made: float | None = None
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=lambda: [None])
    failures: dict[int, Exception] = field(default_factory=dict)  # of each completion that has failed, why

    def add_sequence(self, sequence: Sequence) -> None:
        """Add the next completion, and give it what makes text of its tokens."""
        sequence.detokenizer = Detokenizer(
            self.tokenizer if self.params.detokenize else None,
            self.params.stop or (),
            self.prompt_token_ids,
            min_tokens=self.params.min_tokens,
            skip_special_tokens=self.params.skip_special_tokens,
            include_stop=self.params.include_stop_str_in_output,
        )
        self.sequences.append(sequence)

    @property
    def is_finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def is_awaited(self) -> bool:
        """Whether a launched step makes tokens or log-probabilities of the prompt that the host has not read."""
        num_known = min(self.sequences[0].num_computed + 1, len(self.prompt_token_ids))
        lacks_logprobs = self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < num_known
        return lacks_logprobs or any(one.num_pending for one in self.sequences if one.finish_reason is None)

    def mark_scheduled(self) -> None:
        """Note when a sequence of the request is in a step for the first time."""
        if self.first_scheduled is None:
            self.first_scheduled = time.perf_counter()

    def take(
        self,
        sequence: Sequence,
        sampled: tuple[int, tuple[float, int, list[float], list[int]] | None, Exception | None],
        times: tuple[float, float],
    ) -> None:
        """Append a token that was read, and set the finish_reason if the completion ends with it.

        Args:
            sampled: the token, its log-probabilities, and why it is unusable, which is raised.
            times: when it was read, and when it was first seen to be there. The host may have launched the step behind
                it since.
        """
        token_id, logprobs, error = sampled
        if error is not None:
            raise error
        now, made = times
        self.last_made = made
        if self.first_token is None:
            self.first_token, self.first_made = now, made
        sequence.token_ids.append(token_id)
        if logprobs is not None:
            self._take_logprobs(sequence, token_id, logprobs)
        params, num_generated = self.params, len(sequence.token_ids) - len(self.prompt_token_ids)
        finish_reason: FinishReason | None = None
        stop_reason: int | str | None = None
        # Where there is a grammar, what ends comes only where the grammar may end, and too early only where it must.
        has_grammar = sequence.matcher is not None
        if has_grammar or num_generated >= params.min_tokens:
            if token_id in (params.stop_token_ids or ()):
                finish_reason, stop_reason = "stop", token_id
            elif token_id in self.end_token_ids and (has_grammar or not params.ignore_eos):
                finish_reason = "stop"
        if finish_reason is None or params.include_stop_str_in_output:
            delta, stop = sequence.detokenizer.append([token_id])
            sequence.text_delta += delta
            if finish_reason is not None:
                pass  # the token alone has ended it
            elif stop is not None:
                finish_reason, stop_reason = "stop", stop
            elif num_generated >= sequence.max_tokens:
                finish_reason = "length"
        if finish_reason is not None:
            sequence.text_delta += sequence.detokenizer.flush()
            # Last: whoever has a finish reason is not asked again, so nothing that may fail comes behind.
            sequence.finish_reason, sequence.stop_reason = finish_reason, stop_reason

    def abort(self) -> None:
        """End every completion that still runs."""
        self._end_all("abort")

    def fail(self, error: Exception, failed: Sequence | None = None) -> list[StreamOutput]:
        """End a completion because of its error, and return its last output, which there is whatever went wrong.

        Args:
            failed: one whose last output was not made; None: the error is the request's, all that still run end.
        """
        if failed is not None:
            failed.finish_reason = failed.stop_reason = None
        ended = self._end_all("error", None if failed is None else [failed])
        self.failures |= {sequence.index: error for sequence in ended}
        outputs = []
        for sequence in ended:
            try:
                output = self.stream_output(sequence)
            except Exception:  # this may be what has failed
                empty = dict(text_delta="", token_ids_delta=[], finished=True, finish_reason=sequence.finish_reason)
                output = StreamOutput(request_id=self.request_id, index=sequence.index, **empty)
            output.error = _message(error)
            outputs.append(output)
        return outputs

    @property
    def failure(self) -> Exception | None:
        """Why the first of the completions that failed has failed; None: none did."""
        return self.failures[min(self.failures)] if self.failures else None

    @property
    def error(self) -> str | None:
        """The message of `failure`."""
        return None if self.failure is None else _message(self.failure)

    def _end_all(self, reason: FinishReason, among: list[Sequence] | None = None) -> list[Sequence]:
        """End every completion that still runs, of all or `among` some; return their sequences."""
        every = self.sequences if among is None else among
        ended = [sequence for sequence in every if sequence.finish_reason is None]
        for sequence in ended:
            sequence.finish_reason = reason
            try:
                sequence.text_delta += sequence.detokenizer.flush()
            except Exception:  # the tokenizer's failure may be why the request ends; the text is cut short then
                pass
        return ended

    def _take_logprobs(
        self, sequence: Sequence, token_id: int, logprobs: tuple[float, int, list[float], list[int]]
    ) -> None:
        chosen, rank, top_values, top_ids = logprobs
        sequence.logprobs.append(self._entry(token_id, chosen, rank, top_values, top_ids, sequence.params.logprobs))
        sequence.cumulative_logprob += chosen

    def _entry(
        self, token_id: int, chosen: float, rank: int, top_values: list[float], top_ids: list[int], top: int
    ) -> dict[int, Logprob]:
        """Return log-probabilities of a token and of the `top` likeliest ones, of which more may be given."""
        texts = self.token_texts
        entry = {
            top_id: Logprob(logprob=value, rank=place, decoded_token=texts[top_id])
            for place, (value, top_id) in enumerate(zip(top_values[:top], top_ids[:top], strict=True), start=1)
        }
        entry[token_id] = Logprob(logprob=chosen, rank=rank, decoded_token=texts[token_id])
        return entry

    def take_prompt_logprobs(self, begin: int, values: list[list[float]], ids: list[list[int]]) -> None:
        """Take the log-probabilities of the prompt's tokens behind token `begin`: each one's own, then the top values;
        and its rank, then the top ids. What is computed again after a failure comes again."""
        assert begin < len(self.prompt_logprobs), "some before them are missing"
        tokens, top = self.prompt_token_ids[begin + 1 :], self.params.prompt_logprobs
        self.prompt_logprobs[begin + 1 : begin + 1 + len(values)] = [
            self._entry(token_id, chosen, rank, top_values, top_ids, top)
            for token_id, (chosen, *top_values), (rank, *top_ids) in zip(tokens, values, ids, strict=False)
        ]

    def _known_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        is_whole = len(self.prompt_logprobs) == len(self.prompt_token_ids)
        return self.prompt_logprobs if self.params.prompt_logprobs is not None and is_whole else None

    def output(self) -> RequestOutput:
        """Return all completions as far as they are."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._known_prompt_logprobs(),
            outputs=[self._completion_output(sequence) for sequence in self.sequences],
            finished=self.is_finished,
            metrics=self._known_metrics(),
            error=self.error,
        )

    def _completion_output(self, sequence: Sequence) -> CompletionOutput:
        has_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text=sequence.detokenizer.text,
            token_ids=sequence.output_token_ids,
            cumulative_logprob=sequence.cumulative_logprob if has_logprobs else None,
            logprobs=sequence.logprobs if has_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def stream_output(self, sequence: Sequence, *, is_whole: bool = False) -> StreamOutput:
        """Return what the completion gained since the last call, or all of it."""
        # Each row of each step comes here, and a call of a function counts.
        begin = 0 if is_whole else sequence.num_streamed
        delta = sequence.detokenizer.text if is_whole else sequence.text_delta
        token_ids = sequence.token_ids[len(self.prompt_token_ids) + begin :]
        finished, has_logprobs = sequence.finish_reason is not None, self.params.logprobs is not None
        output = StreamOutput(
            request_id=self.request_id,
            index=sequence.index,
            text_delta=delta,
            token_ids_delta=token_ids,
            logprobs_delta=sequence.logprobs[begin:] if has_logprobs else None,
            text_offsets_delta=self._text_offsets(sequence, begin) if has_logprobs else None,
            prompt_logprobs=None if begin or sequence.index else self._known_prompt_logprobs(),
            finished=finished,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            metrics=self._known_metrics() if finished else None,
        )
        sequence.num_streamed, sequence.text_delta = begin + len(token_ids), ""
        return output

    def _text_offsets(self, sequence: Sequence, begin: int) -> list[int]:
        """Return where each generated token from `begin` on begins in the text; what ends it may be none of it."""
        offsets, detokenizer = sequence.detokenizer.offsets[begin : sequence.num_generated], sequence.detokenizer
        return offsets + [detokenizer.num_chars] * (sequence.num_generated - begin - len(offsets))

    def _known_metrics(self) -> RequestMetrics | None:
        """Return the metrics; None where a completion has failed, and they cannot be told."""
        try:
            return self.metrics()
        except Exception:
            if not self.failures:
                raise
            return None

    def metrics(self) -> RequestMetrics:
        generated = sum(sequence.num_generated for sequence in self.sequences)
        read = sum(sequence.num_blocks_read for sequence in self.sequences)
        resident = sum(sequence.num_resident_read for sequence in self.sequences)
        steps = max(sequence.num_generated for sequence in self.sequences) - 1

        def since_arrival(moment: float | None) -> float | None:
            return None if moment is None else moment - self.arrival

        per_token = None
        if steps > 0 and self.first_made is not None and self.last_made is not None:
            per_token = (self.last_made - self.first_made) / steps
        return RequestMetrics(
            arrival_time=self.arrival_time,
            queue_time=since_arrival(self.first_scheduled),
            time_to_first_token=since_arrival(self.first_token),
            time_per_output_token=per_token,
            total_time=time.perf_counter() - self.arrival if self.is_finished else None,
            num_prompt_tokens=len(self.prompt_token_ids),
            num_cached_tokens=max(sequence.num_cached for sequence in self.sequences),
            num_drafted_tokens=sum(sequence.num_drafted for sequence in self.sequences),
            num_accepted_tokens=sum(sequence.num_accepted for sequence in self.sequences),
            num_generated_tokens=generated,
            kv_resident_share=resident / read if read else 1.0,
            streamed_bytes=sum(one.streamed_bytes + one.fetched_bytes for one in self.sequences),
            copy_wait_time=max(sequence.copy_wait_seconds for sequence in self.sequences),
        )


def _message(error: Exception) -> str:
    return str(error) or type(error).__name__
