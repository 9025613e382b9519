"""The server's log: standard `logging`, to stderr, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

START = "nanoinfer.start"
"""The logger of where the server listens, which is said at every level: programs wait for it."""
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: `time` (UTC), `level`, `logger`, then its `fields` or else its `message`."""

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            **getattr(record, "fields", {"message": record.getMessage()}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


@contextmanager
def logging_to(level: str, form: str, stream: TextIO | None = None) -> Iterator[None]:
    """Have all loggers write to a stream: ours from `level` on, those of libraries their warnings.

    Args:
        level: one of `LEVELS` in options/serve.py.
        form: one of `FORMATS` there.
        stream: None: stderr.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter() if form == "json" else logging.Formatter(_TEXT))
    root, ours, number = logging.getLogger(), logging.getLogger("nanoinfer"), getattr(logging, level.upper())
    before = root.level, ours.level
    root.addHandler(handler)
    root.setLevel(max(number, logging.WARNING))
    ours.setLevel(number)
    logging.getLogger(START).setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.setLevel(before[0])
        ours.setLevel(before[1])
        root.removeHandler(handler)
