"""`nanoinfer serve` on the command line."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys
from typing import Any

import nanoinfer
from nanoinfer.common.units import counted, parse_bytes
from nanoinfer.config import EngineConfig
from nanoinfer.options import tuning as tuning_options
from nanoinfer.options.parser import INTERRUPTED, length

# Longer than the 5 s after which common clients close an idle connection. If the server closed it first, it might do so
# just when the client sends a request, and that request would fail.
_IDLE_SECONDS = 60
_CLOSING_SECONDS = 5  # time to send the answer after the last request has ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items()}
    parser.add_argument("model", help="checkpoint directory or hub id")
    parser.add_argument("--host", default="127.0.0.1", help='"0.0.0.0": all interfaces (default: %(default)s)')
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default: %(default)s)")
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that clients use (default: MODEL)"
    )
    parser.add_argument(
        "--api-key", help="bearer token that clients must send for /v1, /tokenize, /detokenize (default: none)"
    )
    parser.add_argument(
        "--allowed-origins", default="[]", metavar="JSON",
        help="web pages that may use the server from a browser, such as '[\"http://localhost:3000\"]'; "
        "'[\"*\"]': all (default: none)",
    )  # fmt: skip
    parser.add_argument(
        "--max-queue", type=int, default=1024, help="waiting sequences beyond which the answer is 429 (%(default)s)"
    )
    parser.add_argument(
        "--max-queue-bytes", default="256MiB", metavar="SIZE",
        help="bytes of waiting requests beyond which the answer is 429 (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--body-timeout", type=float, default=60.0, metavar="SECONDS",
        help="for the body of a request to arrive (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-step-seconds", type=float, default=120.0, metavar="SECONDS",
        help="a step that runs for longer makes /health say 503 (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="SECONDS",
        help="for running requests to end after SIGTERM or SIGINT (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--offload",
        nargs="?",
        choices=("on", "auto", "off"),
        const="on",
        default="auto",
        help="host memory for KV blocks: on = from the start, auto (default) = when the GPU is full, off",
    )
    parser.add_argument("--gpu-memory", help='GPU memory limit, such as "12GiB"')
    parser.add_argument("--host-memory", help="host memory limit for KV blocks")
    parser.add_argument("--max-model-len", type=length, help="tokens of a prompt with its output")
    parser.add_argument("--max-num-seqs", type=int, help="sequences that run at once")
    parser.add_argument("--max-num-batched-tokens", type=length, help="tokens of one prefill step")
    parser.add_argument("--block-size", type=int, default=defaults["block_size"], help="tokens per KV block")
    parser.add_argument("--dtype", default=defaults["dtype"])
    parser.add_argument("--kv-cache-dtype", default="auto", help='"auto" (as the model) or "fp8"')
    parser.add_argument("--device", default=defaults["device"])
    parser.add_argument("--attention-backend", default=defaults["attention_backend"])
    parser.add_argument(
        "--resident-kv-limit", type=lambda text: 0 if text == "0" else text, metavar="SIZE",
        help='KV that may stay on the GPU in offload mode, such as "2GiB"; 0: none of the full blocks',
    )  # fmt: skip
    tuning_options.add_arguments(parser, enable_prefix_caching=defaults["enable_prefix_caching"])
    parser.add_argument("--seed", type=int, default=defaults["seed"])
    parser.add_argument("--load-format", default=defaults["load_format"], help='"dummy": random weights')
    parser.add_argument(
        "--generation-config", default=defaults["generation_config"],
        help='sampling of requests that leave it out: "auto" (the checkpoint\'s generation_config.json) or '
             '"vllm" (neutral)',
    )  # fmt: skip
    parser.add_argument("--tokenizer", help="directory or hub id (default: the model's)")
    parser.add_argument("--skip-tokenizer-init", action="store_true", help="token ids only")


def run(options: argparse.Namespace) -> int:
    """Serves until SIGINT or SIGTERM, and returns 0, or 1 if the engine failed.

    Raises:
        ValueError: an option cannot be used, or packages are missing.
        OSError: the port cannot be used.
    """
    try:
        import uvicorn

        from nanoinfer.serve.app import create_app
        from nanoinfer.serve.async_engine import AsyncEngine
        from nanoinfer.serve.gate import allowed_origins
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed: pip install 'nanoinfer[serve]'") from error
    if options.shutdown_timeout < 0:
        raise ValueError(f"--shutdown-timeout is {options.shutdown_timeout}, it must be 0 or more seconds")
    for name in ("body_timeout", "max_step_seconds"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(options, name)}, it must be more than 0 seconds")
    origins = allowed_origins(options.allowed_origins)
    max_queue_bytes = parse_bytes(options.max_queue_bytes, "--max-queue-bytes")
    config = EngineConfig.from_arguments(_engine_arguments(options))
    # Bind the port before the model is loaded, because loading takes long. The socket does not listen yet.
    with _bind(options.host, options.port) as listener:
        engine = AsyncEngine(
            lambda: nanoinfer.LLMEngine(config),
            max_queue=options.max_queue,
            max_queue_bytes=max_queue_bytes,
            max_step_seconds=options.max_step_seconds,
        )
        try:
            _start(engine)
            app = create_app(
                engine,
                served_model_names=options.served_model_name or [options.model],
                api_key=options.api_key,
                allowed_origins=origins,
                body_timeout=options.body_timeout,
                shutdown_timeout=options.shutdown_timeout,
            )
            server_config = uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                ws="none",
                lifespan="on",
                timeout_keep_alive=_IDLE_SECONDS,
                # The engine ends its requests by itself. This limit is for clients that do not read their answers.
                timeout_graceful_shutdown=_CLOSING_SECONDS,
            )
            host, port = listener.getsockname()[:2]
            _report(f"{engine.mode} mode; {engine.plan.one_line()}")
            _serve(_server_class(uvicorn.Server)(server_config, engine, options.shutdown_timeout), listener, host, port)
        finally:
            engine.close()
    return 1 if engine.has_failed else 0


def _start(engine: Any) -> None:
    try:
        engine.start()
        # A garbage collection over all imported and loaded objects takes up to a second and stops everything else. None
        # of these objects ever becomes garbage, so exclude them from later collections.
        gc.collect()
        gc.freeze()
    except KeyboardInterrupt:
        _report("interrupted while the model was loaded")
        # The loading thread cannot be stopped, and a normal exit of the interpreter aborts while that thread runs.
        os._exit(INTERRUPTED)


def _serve(server: Any, listener: socket.socket, host: str, port: int) -> None:
    shown = f"[{host}]" if ":" in host else host
    server.announcement = f"serving on http://{shown}:{port}"
    # uvicorn raises the signal that ended it once more, for the handler that was set before. That must not be the
    # default handler, which would kill a process that has just ended properly.
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # uvicorn raises SIGINT once more, too
    finally:
        signal.signal(signal.SIGTERM, before)


def _server_class(base: type) -> type:
    class Server(base):
        """uvicorn's server, but it still answers (503 and /health) while the running requests end."""

        def __init__(self, config: Any, engine: Any, shutdown_timeout: float) -> None:
            super().__init__(config)
            self._engine, self._shutdown_timeout = engine, shutdown_timeout
            self.announcement = ""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            _report(self.announcement)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            self._engine.begin_shutdown()
            running = counted(self._engine.num_streams, "request")
            _report(f"shutting down; {running} may run for {self._shutdown_timeout:g} s")
            draining = asyncio.create_task(self._engine.drain(self._shutdown_timeout))
            while not draining.done() and not self.force_exit:  # a second SIGINT forces the exit
                await asyncio.wait({draining}, timeout=0.1)
            if not draining.done():
                draining.cancel()
                await self._engine.drain(0)
                self.force_exit = False  # nothing runs any more, so an orderly end is fast
            await super().shutdown(sockets)

    return Server


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"--host {host} --port {port} cannot be used ({error}): choose another") from error
    return listener


def _engine_arguments(options: argparse.Namespace) -> dict[str, Any]:
    same = (
        "model max_model_len max_num_seqs max_num_batched_tokens block_size dtype kv_cache_dtype device "
        "attention_backend resident_kv_limit seed load_format generation_config tokenizer skip_tokenizer_init"
    )
    return {name: getattr(options, name) for name in same.split()} | {
        "enable_cpu_offload": {"on": True, "auto": "auto", "off": False}[options.offload],
        "gpu_memory_limit": options.gpu_memory,
        "host_memory_limit": options.host_memory,
        "progress_bar": sys.stderr.isatty(),
        **tuning_options.engine_arguments(options),
    }


def _report(text: str) -> None:
    print(f"nanoinfer: {text}", file=sys.stderr, flush=True)
