"""The lines of the log: one for each prompt that has ended, and one every ten seconds under load."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanoinfer.common.units import format_size
from nanoinfer.serve.ended import EndedRequest
from nanoinfer.serve.load import LOGGED, Load
from nanoinfer.serve.partings import Parting

logger = logging.getLogger("nanoinfer.serve")
_ONLY_IF_ANY = ("link_gbps", "host_kv_share")  # nothing streams, there are no blocks on the host
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


class PartingTexts(NamedTuple):
    """Some text around a parting: what both prompts have before it, and what each has behind it."""

    before: str
    here: str
    there: str


def log_request(ended: EndedRequest, parting: Parting | None = None, texts: PartingTexts | None = None) -> None:
    """Write the line of one prompt that has ended.

    Args:
        parting: where it parted from a recent one, if it did.
        texts: the only text of a prompt that is ever logged; None: nobody has asked for it.
    """
    level = logging.ERROR if "error" in ended.reasons else logging.INFO
    if logger.isEnabledFor(level):
        text, fields = request_text(ended), request_fields(ended)
        if parting is not None:
            text += parting_text(parting, texts)
            fields |= {"parted_at": parting.at, "parted_again": parting.num_again}
        if texts is not None:
            fields |= {"parted_before": texts.before, "parted_here": texts.here, "parted_there": texts.there}
        _write(level, text, fields)
    if ended.failure is not None:  # at debug only: what a tokenizer raises may quote the text
        logger.debug("request %s failed", _shown(ended.name), exc_info=ended.failure)


def log_load(load: Load) -> None:
    """Write the line about the last seconds under load."""
    if logger.isEnabledFor(logging.INFO):
        _write(
            logging.INFO, load_text(load), {"event": "load", **{name: _rounded(value) for name, value in load.items()}}
        )


def request_fields(ended: EndedRequest) -> dict[str, Any]:
    """What the JSON line of a request has; times in seconds, null where it did not come so far."""
    fields = {
        "event": "request",
        "id": ended.name,
        "prompt_tokens": ended.num_prompt_tokens,
        "cached_tokens": ended.num_cached_tokens,
        "output_tokens": ended.num_generated_tokens,
        "time_to_first_token": _rounded(ended.first_token),
        "total_time": _rounded(ended.total),
        "tokens_per_second": _rounded(ended.tokens_per_second, 2),
        "finish_reason": _reasons(ended),
        "bound": ended.bound,
        "streamed_bytes": ended.streamed_bytes,
    }
    if ended.failure is not None:
        fields["error"] = type(ended.failure).__name__
    return fields


def request_text(ended: EndedRequest) -> str:
    first = "no token" if ended.first_token is None else f"first after {ended.first_token:.3f} s"
    rate = "" if ended.tokens_per_second is None else f", {ended.tokens_per_second:.1f} tokens/s"
    error = "" if ended.failure is None else f" ({type(ended.failure).__name__})"
    streamed = f", {format_size(ended.streamed_bytes)} over the link" if ended.streamed_bytes else ""
    return (
        f"request {_shown(ended.name)}: {ended.num_prompt_tokens} tokens in ({ended.num_cached_tokens} from cache), "
        f"{ended.num_generated_tokens} out, {first}, {ended.total:.3f} s in all{rate}, "
        f"finish {_reasons(ended)}{error}{streamed}, bound by {ended.bound}"
    )


def parting_text(parting: Parting, texts: PartingTexts | None) -> str:
    text = (
        f"; parted at token {parting.at} from a recent prompt, which has {parting.num_again} tokens behind that again"
    )
    if texts is not None:
        text += f": behind {texts.before!r} came {texts.here!r}, there {texts.there!r}"
    return text


def load_text(load: Load) -> str:
    said = (text.format(load[name]) for _, name, text in LOGGED if load[name] or name not in _ONLY_IF_ANY)
    return f"load: {', '.join(said)}"


def _write(level: int, text: str, fields: Mapping[str, Any]) -> None:
    logger.log(level, "%s", text, extra={"fields": fields})


def _shown(name: str) -> str:
    """A name that a client may have chosen, on one line and without spaces of its own."""
    return name if _PLAIN_NAME.fullmatch(name) else ascii(name)


def _reasons(ended: EndedRequest) -> str:
    return ",".join(dict.fromkeys(ended.reasons))


def _rounded(value: Any, digits: int = 4) -> Any:
    return round(value, digits) if isinstance(value, float) else value
