"""`nanoinfer serve --ray`: starts Ray Serve, and the application on it, until a signal comes."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import threading

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from nanoinfer.options.serve import Replicas
from nanoinfer.serve.connection import IDLE_SECONDS
from nanoinfer.serve.log import START
from nanoinfer.serve.ray.application import INGRESS, REPLICA, application

logger = logging.getLogger("nanoinfer.serve")
NAME = "nanoinfer"
_CALL_SECONDS = 5.0


def serve_replicas(options: argparse.Namespace, replicas: Replicas, port: int) -> int:
    """Serve until SIGINT or SIGTERM; return 0, or 1 if the replicas cannot be started.

    The cluster is the one that RAY_ADDRESS names; without it Ray is started on this machine, for as long as this runs.
    """
    address = os.environ.get("RAY_ADDRESS")
    ray.init(address, **({} if address else dict(include_dashboard=False)))
    try:
        serve.start(http_options=HTTPOptions(host=options.host, port=port, keep_alive_timeout_s=IDLE_SECONDS))
        try:
            serve.run(application(options, replicas), name=NAME)
        except RuntimeError as error:
            logger.error("the replicas could not be started: %s", error)
            return 1
        shown = f"[{options.host}]" if ":" in options.host else options.host
        logging.getLogger(START).info("serving on http://%s:%d", shown, port)
        _wait_for_signal()
        logger.info("shutting down; requests may run for %g s, Ctrl-C again ends them now", options.shutdown_timeout)
        try:
            _drain(options.shutdown_timeout)
        except KeyboardInterrupt:
            _drain(0.0)
        serve.delete(NAME)
    except KeyboardInterrupt:
        logger.info("interrupted")
    finally:
        if not address:
            serve.shutdown()
        ray.shutdown()
    return 0


def _drain(seconds: float) -> None:
    """Have the replicas end their requests, as one server does: Ray would wait for all, and then kill who answers."""
    for name in (INGRESS, REPLICA):
        try:
            told = serve.get_deployment_handle(name, NAME).broadcast("drain", seconds)
            told.results(timeout_s=seconds + _CALL_SECONDS)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("%s: not all requests may have ended: %s", name, error)


def _wait_for_signal() -> None:
    """Return at SIGINT or SIGTERM; a second SIGINT raises KeyboardInterrupt."""
    stopped = threading.Event()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while not stopped.wait(0.2):
            pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
