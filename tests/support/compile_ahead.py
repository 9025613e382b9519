"""Kernels compiled ahead for a GPU that need not be there; run by test_kernels_compile.py in a process of its own."""

import itertools
import threading
import warnings

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import _async_compile, build, driver
from triton.runtime.jit import JITFunction


class NoGpu:
    """Tells who made and who loaded which launcher; loads nothing."""

    def __init__(self):
        self.launchers, self.loads, self.launches = [], [], []
        self.utils = self
        build._load_module_from_path = lambda name, path: self.loads.append(threading.current_thread())

    def launcher_cls(self, src, metadata):
        self.launchers.append(threading.current_thread().name)
        build._load_module_from_path("__triton_launcher", "a path")
        return lambda *args: self.launches.append(threading.current_thread())

    def get_device_properties(self, device):
        return {"max_shared_mem": 2**16}

    def load_binary(self, name, binary, shared, device):
        return object(), object(), 16, 0, 1024

    def unload_module(self, module):
        pass

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


driver.set_active(gpu := NoGpu())

from nanoinfer.kernels.launch import compile_ahead as ahead
from nanoinfer.kernels.launch.compile_ahead import compile_ahead


@triton.jit
def double_kernel(x, SIZE: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    tl.store(at, 2 * tl.load(at))


@triton.jit
def broken_kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.arange(0, SIZE // 2))


run, load, x = JITFunction.run, build._load_module_from_path, torch.ones(64)
with compile_ahead(x.device):
    for size in (16, 32, 16):
        double_kernel[(1,)](x, SIZE=size)
    other = threading.Thread(target=lambda: double_kernel[(1,)](x, SIZE=32))
    other.start()
    other.join()
assert JITFunction.run is run and build._load_module_from_path is load
kernels = list(double_kernel.device_caches[0][0].values())
assert len(kernels) == 2 and all("cubin" in kernel.asm for kernel in kernels), kernels
assert gpu.launches == [other], "nothing runs but what another thread launches"
made = [thread for thread in gpu.launchers if thread.startswith("compile")]
assert len(made) == 2, f"what a launcher needs was compiled, by {gpu.launchers}"
assert gpu.loads == [other], "nothing is loaded but what another thread launches"
for size in (16, 32):
    double_kernel[(1,)](x, SIZE=size)
assert len(gpu.launches) == 3, "all can be launched"
assert gpu.loads == [other, threading.main_thread()], "who launches a kernel first loads its launcher"

with compile_ahead(x.device):
    broken_kernel[(1,)](x, SIZE=16)
    double_kernel[(1,)](x, SIZE=64)
assert len(double_kernel.device_caches[0][0]) == 3
try:
    broken_kernel.warmup(x, SIZE=16, grid=(1,))
except triton.CompilationError:
    print("refused")


# An interruption, while kernels are asked for or while they are waited for: every launch afterwards runs its kernel.
@triton.jit
def add_kernel(x, SIZE: tl.constexpr, ADDED: tl.constexpr):
    at = x + tl.arange(0, SIZE)
    tl.store(at, ADDED + tl.load(at))


def interrupt(*_):
    raise KeyboardInterrupt


added, ahead.MAX_THREADS = itertools.count(), 1
for interrupt_inside in (True, False):
    wait, num_launchers, values = _async_compile.as_completed, len(gpu.launchers), [next(added) for _ in range(8)]
    _async_compile.as_completed = interrupt
    try:
        with compile_ahead(x.device):
            for value in values:
                add_kernel[(1,)](x, SIZE=16, ADDED=value)
            if interrupt_inside:
                interrupt()
    except KeyboardInterrupt:
        print("interrupted")
    _async_compile.as_completed = wait
    assert JITFunction.run is run and _async_compile.active_mode.get() is None
    assert build._load_module_from_path is load
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("compile")]
    assert len(gpu.launchers) - num_launchers < len(values), "what nobody waits for is not compiled"
    gpu.launches.clear()
    for value in values:
        add_kernel[(1,)](x, SIZE=16, ADDED=value)
    assert len(gpu.launches) == len(values), gpu.launches

# Where triton lacks what this takes, a launch inside compiles and runs.
compile_mode, gpu.launches[:] = triton.AsyncCompileMode, []
del triton.AsyncCompileMode
with warnings.catch_warnings(record=True) as caught, compile_ahead(x.device):
    add_kernel[(1,)](x, SIZE=16, ADDED=1000)
assert gpu.launches == [threading.main_thread()] and "cannot compile them ahead" in str(caught[0].message)
triton.AsyncCompileMode = compile_mode
with compile_ahead(x.device):
    add_kernel[(1,)](x, SIZE=16, ADDED=1001)
assert len(gpu.launches) == 1, "it can again"

# Where triton loads launchers in another way, that is left alone.
del build._load_module_from_path
gpu.launcher_cls = lambda src, metadata: gpu.launches.append
with compile_ahead(x.device):
    add_kernel[(1,)](x, SIZE=16, ADDED=1003)
assert not hasattr(build, "_load_module_from_path")

# Where triton keeps its kernels elsewhere, only the unfinished ones of an interruption stay.
with compile_ahead(x.device):
    add_kernel[(1,)](x, SIZE=16, ADDED=1002)
    del add_kernel.device_caches
assert JITFunction.run is run
