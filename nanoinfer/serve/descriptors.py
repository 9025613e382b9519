"""File descriptors: as many connections as there are descriptors for, and one line in the log where there are none."""

from __future__ import annotations

import logging

logger = logging.getLogger("nanoinfer.serve")
_MOST = 65_536
_OWN = 256  # of the model's files, the log, and the processes that try grammars
_LEAST = 16
_NO_DESCRIPTOR = "socket.accept() out of system resource"  # asyncio says it for each place of the queue, every second


def make_room() -> int | None:
    """Raise the limit of open files as far as a user may; return how many connections may be open, None: any number."""
    try:
        import resource
    except ImportError:  # not on this system
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a sandbox may forbid it
            wanted = soft
        soft = wanted
    logging.getLogger("asyncio").addFilter(_once)
    return None if soft == resource.RLIM_INFINITY else max(_LEAST, soft - _OWN)


class Connections:
    """How many may be open.

    Args:
        most: None: any number.
    """

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._is_said = False

    def refuses(self, number: int) -> bool:
        """Whether the newest of so many open connections is one too many. The first that is, the log names."""
        if self.most is None or number <= self.most:
            return False
        if not self._is_said:
            self._is_said = True
            logger.warning(
                "%d connections are open, and there are file descriptors for no more: further ones get 503, now and "
                "later; raise the limit with ulimit -n",
                self.most,
            )
        return True


_said: set[str] = set()


def _once(record: logging.LogRecord) -> bool:
    if not str(record.msg).startswith(_NO_DESCRIPTOR):
        return True
    is_new, record.exc_info = _NO_DESCRIPTOR not in _said, None
    record.msg, record.args = "no file descriptor is free for a new connection, which waits: raise ulimit -n", ()
    _said.add(_NO_DESCRIPTOR)
    return is_new
