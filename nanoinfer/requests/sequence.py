"""One sequence and its progress through the engine."""

from __future__ import annotations

import enum
from concurrent.futures import Future
from dataclasses import dataclass, field

from nanoinfer.outputs import Logprob
from nanoinfer.requests.detokenizer import Detokenizer
from nanoinfer.requests.thinking import ThinkingBudget
from nanoinfer.sampling.limits import TokenLimits
from nanoinfer.sampling_params import SamplingParams
from nanoinfer.structured.matcher import Matcher


class SequenceState(enum.Enum):
    WAITING = "waiting"  # not admitted yet, or preempted
    MOVING = "moving"  # admitted; its KV or state is on its way to the GPU, or a copy of its state to the host
    PREFILL = "prefill"  # admitted; part of its tokens has no KV yet
    DECODE = "decode"  # every token but the last has its KV in the cache, once the scheduled step has run
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """A prompt and what is generated for it: one completion of a request.

    `num_computed` counts the tokens whose KV is in the cache. A request with `n > 1` has n sequences.
    After its initial value each field is written in one file (`tests/test_sources.py` names it).

    The host launches a step before it has read the tokens of the previous step. These *pending* tokens count as tokens,
    but only the device knows their ids. A token that comes after the end stays pending: it is dropped unread.

    Attributes:
        num_tokens: tokens so far, pending ones included.
        max_num_tokens: the most tokens that this sequence can ever have.
        row: place in the persistent device tables, kept from admission to the end.
        state_slot: place of what its layers keep besides keys and values, as long.
        draft_slots: places of the same behind each of the tokens that are drafted in the step in flight.
        kept_blocks: host blocks with the KV of a sequence that gave way (see `nanoinfer.kv.mover`); None: it did not.
        kept_state: host blocks with what its layers keep besides, likewise.
        snapshot_ends: tokens behind which its state is to be kept for others, ascending (see `nanoinfer.kv.snapshots`).
        num_cached: prompt tokens taken from the prefix cache.
        detokenizer: has the text so far; set by `Request.add_sequence`.
        text_delta: text that no StreamOutput has yet.
    """

    sequence_id: int
    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int  # params.max_tokens, cut to what max_model_len leaves
    limits: TokenLimits | None = None  # what params ask of the choice of tokens
    matcher: Matcher | None = None  # how far it has come in its grammar, if it has one
    thinking: ThinkingBudget | None = None  # how far it has come in its thinking, if that is bounded
    is_masked_aside: bool = False  # its masks are late: they are made aside, and it waits for them alone
    mask: Future | None = None  # the next one, where it is made aside
    is_ahead: bool = False  # nobody asks for it: what is to be found later is computed
    token_ids: list[int] = field(init=False)
    num_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    state: SequenceState = SequenceState.WAITING
    row: int | None = None
    state_slot: int | None = None
    draft_slots: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    num_published: int = 0  # tokens whose full blocks were offered to the prefix cache of this mode
    streamed_bytes: int = 0  # of its blocks and of weights, over all its steps; of what is shared, only its share
    fetched_bytes: int = 0  # its share of experts that came one by one in these steps
    num_blocks_read: int = 0  # full blocks that its steps read, counted in each step
    num_resident_read: int = 0  # the part of `num_blocks_read` that lay on the GPU
    copy_wait_seconds: float = 0.0  # estimate
    num_drafted: int = 0  # tokens that were guessed and computed beside the last one
    num_accepted: int = 0  # those of them that were right
    num_promised_host: int = 0  # host blocks promised at admission and not handed out yet
    kept_blocks: list[int] | None = None
    kept_state: list[int] = field(default_factory=list)
    snapshot_ends: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its beginnings, for the prefix cache
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    detokenizer: Detokenizer = field(init=False)
    text_delta: str = ""
    num_streamed: int = 0  # generated tokens that StreamOutputs have had
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_tokens = len(self.token_ids)
        self.max_num_tokens = len(self.token_ids) + self.max_tokens

    @property
    def num_pending(self) -> int:
        """Tokens sampled on the device that the host has not read yet."""
        return self.num_tokens - len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """Tokens generated so far, pending ones included."""
        return self.num_tokens - len(self.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """Tokens generated and read so far."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def needs_mask(self) -> bool:
        """Whether what its next token may be depends on all tokens before, which the host must have read then."""
        if self.matcher is not None:
            return True
        return self.thinking is not None and self.thinking.may_end(*self.output, self.num_pending)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many log-probabilities are wanted with each token of the prompt; None: none. The first completion of a
        request has them made for all."""
        return None if self.index else self.params.prompt_logprobs

    @property
    def output(self) -> tuple[list[int], int]:
        """All tokens that were read, and where those that were generated begin."""
        return self.token_ids, len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED
