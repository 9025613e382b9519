"""What a server is started with, checked before anything is loaded."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, fields
from typing import Any

from starlette.applications import Starlette

from nanoinfer.common.units import parse_bytes
from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.options.engine import engine_arguments
from nanoinfer.parsers.answer_format import check_parsers
from nanoinfer.serve.app import create_app
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.gate import allowed_origins

_OF_ENGINE = ("max_queue", "max_queue_bytes", "max_step_seconds", "compute_ahead")
_OF_APP = (
    "served_model_names", "api_key", "allowed_origins", "body_timeout", "strict", "images", "special_tokens",
    "tool_call_parser", "reasoning_parser", "page",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of an engine, and what `AsyncEngine` and `create_app` say of theirs.

    Attributes:
        shutdown_timeout: seconds for running requests to end.
        log_level, log_format: as of `logging_to`.
    """

    config: EngineConfig
    served_model_names: list[str]
    api_key: str | None
    allowed_origins: list[str]
    body_timeout: float
    strict: bool
    images: str
    special_tokens: str
    tool_call_parser: str
    reasoning_parser: str
    page: bool
    max_queue: int
    max_queue_bytes: int
    max_step_seconds: float
    compute_ahead: bool
    shutdown_timeout: float
    log_level: str
    log_format: str

    def make_engine(self) -> AsyncEngine:
        """Return an engine that is not started."""
        return AsyncEngine(lambda: LLMEngine(self.config), **self._named(_OF_ENGINE))

    def make_app(self, engine: AsyncEngine) -> Starlette:
        """Return the application for an engine that was started."""
        return create_app(engine, **self._named(_OF_APP))

    def _named(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


def settings_of(options: argparse.Namespace) -> ServerSettings:
    """Return what the options of `nanoinfer serve` say.

    Raises:
        ValueError: says which option is wrong, and what is allowed.
    """
    if options.api_key == "":  # as of a variable that is not set: anybody could guess it
        raise ValueError("--api-key is empty: give a key, or leave the option out to serve without one")
    if not options.shutdown_timeout >= 0:  # also where it is NaN
        raise ValueError(f"--shutdown-timeout is {options.shutdown_timeout}, it must be 0 or more seconds")
    for name in ("body_timeout", "max_step_seconds"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}, it must be more than 0 seconds")
    check_parsers(options.tool_call_parser, options.reasoning_parser)
    shows_bar = sys.stderr.isatty() and options.log_format == "text"
    own = dict(
        config=EngineConfig(model=options.model, progress_bar=shows_bar, **engine_arguments(options)),
        served_model_names=options.served_model_name or [options.model],
        allowed_origins=allowed_origins(options.allowed_origins),
        max_queue_bytes=parse_bytes(options.max_queue_bytes, "--max-queue-bytes"),
    )
    names = [field.name for field in fields(ServerSettings)]
    return ServerSettings(**{name: own[name] if name in own else getattr(options, name) for name in names})
