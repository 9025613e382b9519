"""Token ids to text, piece by piece: characters that span tokens, and stop strings that span tokens."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

# What a decoder writes for bytes that are not (yet) a complete UTF-8 character.
REPLACEMENT_CHARACTER = "\ufffd"
# vLLM's number: enough context for tokenizers whose first piece of a text loses its leading space.
NUM_PROMPT_CONTEXT_TOKENS = 5
# A UTF-8 character has at most 4 bytes and a token has at least one. A longer wait is for text that never comes: output
# that is not UTF-8, or a run of tokens without text. The wait must end, or each new token would decode them all.
MAX_WAITING_TOKENS = 16


class TokenTexts(dict):
    """The text of single tokens, by id; None without a tokenizer. Those that were asked for are kept: with
    log-probabilities the same ones are, again and again, and a tokenizer takes microseconds for one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        how = dict(skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = self[token_id] = self._tokenizer.decode([token_id], **how)
        return text


class Detokenizer:
    """The text of one completion, as its tokens arrive.

    Decoding is the prefix-offset algorithm of vLLM (`vllm/transformers_utils/detokenizer_utils.py`,
    `detokenize_incrementally`) and text-generation-inference: the last tokens whose text was released are decoded again
    together with the new tokens, and the difference is the new text. The cost per token does not grow with the text.
    (`DecodeStream` of tokenizers does the same, but never gives out bytes that are no text, and each token without text
    makes the next one dearer.)

    A stop string is found even if it spans several tokens. If several stop strings match, the one that is complete
    first counts; if two end at the same place, the longer one counts. So the result does not depend on how many tokens
    come at once. The text ends before the stop string, or with it. Text that may be the beginning of a stop string is
    held back until it is one or cannot become one.

    Append the token that ends a completion (end token or stop_token_ids) only if its text is part of the output.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Iterable[str] = (),
        prompt_token_ids: Sequence[int] = (),
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ):
        """
        tokenizer: None: the text is empty, and no stop string is ever found.
        stop: strings that end the completion.
        prompt_token_ids: the prompt; its last tokens are the context of the first generated one.
        min_tokens: a stop string that is complete within the first `min_tokens` tokens is ordinary text.
        include_stop: the text ends with the stop string, not before it.
        """
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._skip_special_tokens, self._include_stop = skip_special_tokens, include_stop
        # The text of tokens [0, _num_read) of the window was released (or is prompt); the other tokens still wait.
        self._window = list(prompt_token_ids[-NUM_PROMPT_CONTEXT_TOKENS:]) if tokenizer else []
        self._num_read = len(self._window)
        self._num_read_chars = len(self._decode(self._window))
        self._held = ""  # decoded but not released: the longest end of the text that may begin a stop string
        self._released: list[str] = []
        self._num_chars = self._num_waiting_chars = 0  # decoded so far; whole ones of tokens that wait
        self.offsets: list[int] = []
        """Of each token taken: how many characters of the text come before it. A token that goes on with a character
        stands where that begins."""
        self.num_tokens = 0
        """Tokens taken so far, including the token that completed the stop string."""
        self.stop_hit: str | None = None
        """The stop string that was found."""

    @property
    def text(self) -> str:
        """All text released so far: the deltas joined."""
        return "".join(self._released)

    @property
    def num_chars(self) -> int:
        """Whole characters of all tokens so far, those included that are held back or were cut off by a stop string."""
        return self._num_chars + self._num_waiting_chars

    def append(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """Take generated tokens; return the text that they release and the stop string found, if any.

        Tokens after a stop string are ignored.
        """
        num_released = len(self._released)
        for token_id in token_ids:
            if self.stop_hit is not None:
                break
            self.num_tokens += 1
            self.offsets.append(self._num_chars + self._num_waiting_chars)
            if self._tokenizer is not None:
                self._window.append(token_id)
                self._release(self._read_window(), search=self.num_tokens > self._min_tokens)
        return "".join(self._released[num_released:]), self.stop_hit

    def flush(self) -> str:
        """At the end of a completion, release the text held back. An unfinished character becomes U+FFFD."""
        if self._tokenizer is None or self.stop_hit is not None:
            return ""
        num_released = len(self._released)
        piece = self._decode(self._window)[self._num_read_chars :]
        self._start_window(at=len(self._window))
        self._release(piece, search=self.num_tokens > self._min_tokens)
        self._released.append(self._held)
        self._held = ""
        return "".join(self._released[num_released:])

    def _decode(self, token_ids: list[int]) -> str:
        if not token_ids:
            return ""
        return self._tokenizer.decode(
            token_ids, skip_special_tokens=self._skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _read_window(self) -> str:
        """Return the text that the waiting tokens add, or "" if they must wait for more tokens."""
        text = self._decode(self._window)
        is_overdue = len(self._window) - self._num_read >= MAX_WAITING_TOKENS
        if len(text) <= self._num_read_chars:
            # The waiting tokens have no text, such as special tokens. The next token needs the context before them, so
            # only they leave the window.
            if is_overdue:
                del self._window[self._num_read :]
            return ""
        if text.endswith(REPLACEMENT_CHARACTER) and not is_overdue:
            self._num_waiting_chars = max(0, len(text.rstrip(REPLACEMENT_CHARACTER)) - self._num_read_chars)
            return ""
        piece = text[self._num_read_chars :]
        self._start_window(at=self._num_read)
        return piece

    def _start_window(self, *, at: int) -> None:
        """Start a new window when all text was released: the tokens from `at` on are context for the next token."""
        self._window = self._window[at:]
        self._num_read = len(self._window)
        self._num_read_chars = len(self._decode(self._window))

    def _release(self, piece: str, *, search: bool) -> None:
        """Release decoded text up to a stop string if there is one, else up to text that may become one."""
        if not piece:
            return
        self._num_chars, self._num_waiting_chars = self._num_chars + len(piece), 0
        text = self._held + piece
        found = self._find_stop(text) if search else None
        if found is not None:
            start, self.stop_hit = found
            self._released.append(text[: start + len(self.stop_hit) * self._include_stop])
            self._held = ""
            return
        num_held = self._num_chars_to_hold(text)
        self._released.append(text[: len(text) - num_held])
        self._held = text[len(text) - num_held :]

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Return (start, stop string) of the match that ends first in `text`; of several, the longest."""
        # A match that ends in the old text was complete within min_tokens; otherwise it was found before.
        found = ((text.find(stop, max(0, len(self._held) + 1 - len(stop))), stop) for stop in self._stop)
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        return min(matches)[1:] if matches else None

    def _num_chars_to_hold(self, text: str) -> int:
        """Return the length of the longest end of `text` that is a proper beginning of a stop string."""
        lengths = ((stop, length) for stop in self._stop for length in range(1, min(len(stop), len(text) + 1)))
        return max((length for stop, length in lengths if text.endswith(stop[:length])), default=0)
