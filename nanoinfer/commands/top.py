"""`nanoinfer top`: what a server's engine does, in a terminal."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from nanoinfer.options.parser import Parser

_URL = "http://127.0.0.1:8000"
_KEY = "NANOINFER_API_KEY"


def add_arguments(parser: Parser) -> None:
    parser.add_argument("url", nargs="?", default=_URL, metavar="URL", help="of the server (default: %(default)s)")
    parser.add_argument(
        "--api-key", default=os.environ.get(_KEY), help=f"key that it asks for (default: the variable {_KEY})"
    )
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (%(default)s)"
    )
    parser.add_argument("--once", action="store_true", help="look twice, print that and end; so without a terminal")


def run(options: argparse.Namespace) -> int:
    """Show the picture until Ctrl-C."""
    if not options.interval > 0:
        raise ValueError(f"--interval is {options.interval}, it must be more than 0 seconds")
    live, console, picture = needed()
    looks = Looks(options.url, options.api_key, picture)
    out = console()
    looks.look()
    if options.once or not out.is_terminal:
        time.sleep(options.interval)
        out.print(looks.look())
        return 0
    with live(looks.look(), console=out, auto_refresh=False, screen=True) as shown:
        while True:
            time.sleep(options.interval)
            try:
                shown.update(looks.look(), refresh=True)
            except ConnectionError as error:
                shown.update(str(error), refresh=True)


def needed() -> tuple[Any, Any, Any]:
    """Return what draws; ValueError: it is not installed."""
    try:
        from rich.console import Console
        from rich.live import Live

        from nanoinfer.commands.picture import Picture
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        raise ValueError(f"{package} is not installed: in the clone, pip install -e '.[chat]'") from error
    return Live, Console, Picture


class Looks:
    """Looks at a server again and again.

    Args:
        picture: the class of a replica's.
    """

    def __init__(self, url: str, api_key: str | None, picture: Any) -> None:
        import httpx

        self._url, self._failures, self._picture = url.rstrip("/"), httpx.HTTPError, picture
        if "://" not in self._url:
            raise ValueError(f"{url} is no address of a server: give one such as {_URL}")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._client = httpx.Client(headers=headers, timeout=30)
        self._pictures: dict[str, Any] = {}

    def look(self) -> Any:
        """Return what rich shows of all replicas; ConnectionError: the server does not answer."""
        from rich.console import Group

        try:
            answer = self._client.get(f"{self._url}/engine")
        except self._failures as error:
            raise ConnectionError(
                f"{self._url} does not answer ({error}): is nanoinfer serve running there?"
            ) from error
        if answer.status_code != 200:
            raise ConnectionError(f"{self._url}/engine answers {answer.status_code}: {_message(answer)}")
        now, pictures = time.monotonic(), {}
        for one in answer.json()["replicas"]:
            picture = self._pictures.get(one["name"]) or self._picture(one["facts"], one["name"])
            picture.update(one["figures"], now - one["age"], one["age"], one["step_seconds"])
            pictures[one["name"]] = picture
        self._pictures = pictures  # replicas come and go
        return Group(*pictures.values())


def _message(answer: Any) -> str:
    try:
        return answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return "it is no server of nanoinfer, or an old one"
