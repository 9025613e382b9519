"""Replicas of the server behind one address, on Ray Serve. All but `digests`, `fleet`, `exchange`, `relay` and
`replica` needs the extra `ray`."""

from __future__ import annotations

from typing import Any


def app(arguments: dict[str, Any]) -> Any:
    """See `application.app`: `serve run nanoinfer.serve.ray:app model=MODEL`."""
    from nanoinfer.serve.ray import application

    return application.app(arguments)
