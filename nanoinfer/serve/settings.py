"""What a server is started with, checked before anything is loaded."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, fields

from starlette.applications import Starlette

from nanoinfer.common.units import parse_bytes
from nanoinfer.config import EngineConfig
from nanoinfer.engine.engine import LLMEngine
from nanoinfer.options.engine import engine_arguments
from nanoinfer.parsers.answer_format import check_parsers
from nanoinfer.serve.app import AppSettings, create_app
from nanoinfer.serve.async_engine import AsyncEngine
from nanoinfer.serve.gate import allowed_origins

_OF_ENGINE = ("max_queue", "max_queue_bytes", "max_step_seconds", "compute_ahead")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of an engine, and what `AsyncEngine` says of its own.

    Attributes:
        app: of the application.
        shutdown_timeout: seconds for running requests to end.
        log_level, log_format: as of `logging_to`.
    """

    config: EngineConfig
    app: AppSettings
    max_queue: int
    max_queue_bytes: int
    max_step_seconds: float
    compute_ahead: bool
    shutdown_timeout: float
    log_level: str
    log_format: str

    def make_engine(self) -> AsyncEngine:
        """Return an engine that is not started."""
        of_engine = {name: getattr(self, name) for name in _OF_ENGINE}
        return AsyncEngine(lambda: LLMEngine(self.config), **of_engine)

    def make_app(self, engine: AsyncEngine) -> Starlette:
        """Return the application for an engine that was started."""
        return create_app(engine, self.app)


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
        served_model_names=options.served_model_name or [options.model],
        allowed_origins=allowed_origins(options.allowed_origins),
        config=EngineConfig(model=options.model, progress_bar=shows_bar, **engine_arguments(options)),
        max_queue_bytes=parse_bytes(options.max_queue_bytes, "--max-queue-bytes"),
    )
    given = vars(options) | own
    given["app"] = AppSettings(**{field.name: given[field.name] for field in fields(AppSettings)})
    return ServerSettings(**{field.name: given[field.name] for field in fields(ServerSettings)})
