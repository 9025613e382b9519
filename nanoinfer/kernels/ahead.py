"""Kernels compiled before they are needed, many at a time: one after the other they take most of a cold start."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
import triton
from triton.runtime.jit import JITFunction

MAX_THREADS = 16
_ONE_AT_A_TIME = threading.Lock()


class _Compilers(ThreadPoolExecutor):
    """Threads that also load what they compiled and make its launcher, for which triton may call a C compiler."""

    def __init__(self, device: torch.device) -> None:
        select = (torch.cuda.set_device, (device,)) if device.type == "cuda" else (None, ())
        super().__init__(min(MAX_THREADS, os.cpu_count() or 1), "compile", *select)

    def submit(self, compile_kernel: Callable) -> Future:
        def prepare():
            kernel = compile_kernel()
            _ = kernel.run  # made when it is first asked for
            return kernel

        return super().submit(prepare)


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Inside, this thread's launch of a Triton kernel begins to compile it, and runs nothing; at the end all can run.

    What a launch would have written keeps what it holds. Most of a compilation runs without Python's lock, so threads
    help. A kernel that does not compile says so when it is launched outside.

    Args:
        device: where the kernels will run.
    """
    this_thread = threading.get_ident()

    def compile_only(self: JITFunction, *args, grid, warmup, **kwargs):
        # Another engine, in a thread of its own, must not lose a launch.
        return run(self, *args, grid=grid, warmup=warmup or threading.get_ident() == this_thread, **kwargs)

    with _ONE_AT_A_TIME, _Compilers(device) as executor:
        run = JITFunction.run
        JITFunction.run = compile_only
        try:
            with triton.AsyncCompileMode(executor, ignore_errors=True):
                yield
        finally:
            JITFunction.run = run
