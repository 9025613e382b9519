"""Compile kernels before they are needed, many at a time: one after the other they take most of a cold start."""

from __future__ import annotations

import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from nanoinfer.devices.registry import device_of

MAX_THREADS = 16
_LOAD = "_load_module_from_path"
"""The name of triton's function that loads a compiled module."""
_this_thread = threading.local()
_ONE_AT_A_TIME = threading.Lock()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile kernels and their launchers, for which triton may call a C compiler.

    A launcher made here is not loaded, but thrown away: only the compiler's result in triton's cache is wanted. Triton
    3.6 loads all launchers as modules of one name, and Python may give a thread that loads one the functions of another
    that is being loaded. A launch would then pass the arguments of another kernel. So the thread that launches a kernel
    loads its launcher.
    """

    def __init__(self, device: torch.device, driver: Any) -> None:
        self._driver = driver
        streams = device_of(device).streams
        select = (None, ()) if streams is None else (streams.set_device, (device,))
        super().__init__(min(MAX_THREADS, os.cpu_count() or 1), "compile", *select)

    def submit(self, compile_kernel: Callable) -> Future:
        def prepare():
            kernel = compile_kernel()
            _this_thread.loads_nothing = True
            try:
                self._driver.active.launcher_cls(kernel.src, kernel.metadata)
            finally:
                _this_thread.loads_nothing = False
            return kernel

        return super().submit(prepare)


def _parts_of_triton() -> SimpleNamespace:
    """Find what compiling ahead needs, most of it private. Raise ImportError or AttributeError if a part is missing."""
    import triton
    from triton.runtime import build, driver
    from triton.runtime._async_compile import FutureKernel, active_mode
    from triton.runtime.jit import JITFunction

    if not {"grid", "warmup"} <= inspect.signature(JITFunction.run).parameters.keys():
        raise AttributeError("JITFunction.run takes no grid and warmup")
    kernels = dict(function=JITFunction, future_kernel=FutureKernel, driver=driver, build=build)
    return SimpleNamespace(mode=triton.AsyncCompileMode, active_mode=active_mode, **kernels)


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Inside the context, this thread's launch of a Triton kernel starts its compilation and runs nothing.

    At the end of the context all these kernels are compiled; each is loaded when it is first launched. Tensors that a
    launch would have written are unchanged. Most of a compilation runs without Python's lock, so threads help. A kernel
    that does not compile raises its error when it is launched outside. An exception raised inside, such as Ctrl-C,
    propagates once the kernels that are being compiled are done; the other kernels are compiled when they are launched.

    If triton lacks a part that this needs, launches inside compile and run one after the other. So every kernel that is
    launched inside must be allowed to run.

    Args:
        device: where the kernels will run.
    """
    try:
        parts = _parts_of_triton()
    except (ImportError, AttributeError) as error:
        warnings.warn(
            "kernels are compiled one after the other, which makes a first start slower: this version of triton cannot "
            f"compile them ahead ({error})",
            stacklevel=3,
        )
        yield
        return
    with _ONE_AT_A_TIME, _compiling(parts, device):
        yield


@contextmanager
def _compiling(triton: SimpleNamespace, device: torch.device) -> Iterator[None]:
    this_thread = threading.get_ident()
    launched = set()

    def compile_only(self, *args, grid, warmup, **kwargs):
        # Another engine, in a thread of its own, must not lose a launch.
        if threading.get_ident() == this_thread:
            launched.add(self)
            warmup = True
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    def load_module(name: str, path: str) -> Any:
        is_empty = getattr(_this_thread, "loads_nothing", False)
        return SimpleNamespace(launch=None) if is_empty else load(name, path)

    executor, run, mode_before = _Compilers(device, triton.driver), triton.function.run, triton.active_mode.get()
    mode, load = triton.mode(executor, ignore_errors=True), getattr(triton.build, _LOAD, None)
    try:
        triton.function.run = compile_only
        if load is not None:  # later versions need not load anything
            setattr(triton.build, _LOAD, load_module)
        mode.__enter__()
        yield
        mode.__exit__(None, None, None)  # waits for every kernel
    finally:
        # The cleanup is not left to the mode. After an interruption the mode would wait for kernels that nobody wants
        # (forever, if they are cancelled). Triton 3.6 and 3.7 even stay in the mode if this wait is interrupted: no
        # launch would run again.
        triton.active_mode.set(mode_before)
        triton.function.run = run
        for function in launched:
            _forget_unfinished(function, triton.future_kernel)
        try:
            executor.shutdown(cancel_futures=True)
        finally:
            if load is not None:
                setattr(triton.build, _LOAD, load)


def _forget_unfinished(function, future_kernel: type) -> None:
    """Drop kernels not ready. The next launch compiles them, instead of asking a failed or cancelled future."""
    for kernels, *_ in getattr(function, "device_caches", {}).values():
        for key in [key for key, kernel in kernels.items() if isinstance(kernel, future_kernel)]:
            kernels.pop(key, None)
