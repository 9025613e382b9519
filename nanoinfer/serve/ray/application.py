"""The two deployments: replicas with the model, and the ingress before them."""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from nanoinfer.options.parser import Parser
from nanoinfer.options.serve import Replicas, add_arguments, replicas_of, server_options
from nanoinfer.serve.ray.ingress import Ingress
from nanoinfer.serve.ray.replica import Replica
from nanoinfer.serve.ray.router import PrefixRouter
from nanoinfer.serve.settings import settings_of

REPLICA, INGRESS = "Replica", "Ingress"
# An engine has a queue of its own, and says 429: nobody should wait before it, where nobody sees it.
_MOST_REQUESTS = 100_000
_TARGET_REQUESTS = 16  # of each replica, where their number follows the load
_HEALTH_SECONDS = 5.0
_LOADS = 3  # of a model that cannot be loaded, before the start is given up
_CLOSING_SECONDS = 10.0  # for an engine to give back its memory


class _Named(Replica):
    """A replica that has Ray's name for it."""

    def __init__(self, options: dict[str, Any], threads: str | None) -> None:
        super().__init__(options, threads, serve.get_replica_context().replica_id.unique_id)


def application(options: argparse.Namespace, replicas: Replicas) -> serve.Application:
    """Return what `serve.run` starts. options: of `nanoinfer serve`, checked by `settings_of`."""
    told = server_options(options)
    num_gpus = replicas.num_gpus
    if num_gpus is None:
        num_gpus = 1.0 if ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1 else 0.0
    logging = LoggingConfig(log_level="WARNING", enable_access_log=False)
    number = dict(num_replicas=replicas.least)
    if replicas.least < replicas.most:
        scaled = dict(min_replicas=replicas.least, max_replicas=replicas.most, target_ongoing_requests=_TARGET_REQUESTS)
        number = dict(autoscaling_config=AutoscalingConfig(**scaled))
    shared = dict(
        max_ongoing_requests=_MOST_REQUESTS,
        graceful_shutdown_timeout_s=options.shutdown_timeout + _CLOSING_SECONDS,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=_HEALTH_SECONDS,
        logging_config=logging,
    )
    replica = serve.deployment(
        _Named,
        name=REPLICA,
        max_constructor_retry_count=_LOADS,
        ray_actor_options=dict(num_cpus=replicas.num_cpus, num_gpus=num_gpus),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs=dict(by_prefix=replicas.by_prefix)
        ),
        **number,
        **shared,
    )
    ingress = serve.deployment(Ingress, name=INGRESS, ray_actor_options=dict(num_cpus=0), **shared)
    return ingress.bind(replica.bind(told, os.environ.get("OMP_NUM_THREADS")), told)


def app(arguments: dict[str, Any]) -> serve.Application:
    """Return the application for `serve run nanoinfer.serve.ray:app model=MODEL replicas=2 gpu-memory-limit=12GiB`.

    Args:
        arguments: options of `nanoinfer serve` by name, without the dashes at the beginning; `model` is the model. A
            switch is "true", or "false" for its `--no-`.

    Raises:
        ValueError: an option is not known, or its value is not possible.
    """
    parser = _Arguments(prog="nanoinfer.serve.ray:app")
    add_arguments(parser)
    given = {name.replace("_", "-"): str(value) for name, value in arguments.items()}
    if "model" not in given:
        raise ValueError("no model is given: add model=MODEL, a checkpoint directory, a GGUF file or a hub id")
    words = [given.pop("model")]
    for name, value in given.items():
        if name in ("host", "port", "ray"):
            raise ValueError(f"{name} is Ray's own: it is an option of `serve start`, and of Serve's config file")
        if value.lower() in ("true", "false") and f"--{name}" in parser.known:
            words.append(f"--{name}" if value.lower() == "true" else f"--no-{name}")
        else:
            words.append(f"--{name}={value}")
    options = parser.parse_args(words)
    settings_of(options)
    return application(options, replicas_of(options))


class _Arguments(Parser):
    def error(self, message: str) -> None:
        raise ValueError(message)
