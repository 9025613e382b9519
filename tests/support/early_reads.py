"""What kernels do before they wait for the one in front of them, in Triton's interpreter: see `kernels/launch/pdl.py`.

The interpreter knows each address, so no launch has to say what it reads early. Refused are: reading what the launch
right before writes, or an operation of torch behind that one, copies among them; writing; letting the next one in; and
not waiting at all.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanoinfer.devices.target import Target
from nanoinfer.kernels.launch import pdl


class EarlyRead(AssertionError):
    """On a device with dependent launches it may read what is not there yet."""


@dataclass
class Writer:
    """Who wrote last: addresses of bytes, [n, 2] begin and end each."""

    name: str = "nothing"
    written: list[np.ndarray] = field(default_factory=list)

    def has_written(self, read: np.ndarray) -> bool:
        return any(
            ((read[:, None, 0] < one[None, :, 1]) & (one[None, :, 0] < read[:, None, 1])).any() for one in self.written
        )


class Watch(TorchDispatchMode):
    """Attributes:
    met: names of the kernels that were launched to start early.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met: set[str] = set()
        self.writers = [Writer()]  # the last launch, and what is no launch behind it
        self.launched: Writer | None = None
        self._early: list[np.ndarray] | None = None  # what the running program read; None: it has waited
        self._starts_early = False

    @contextmanager
    def launch(self, name: str, starts_early: bool):
        """Have what the interpreter does from now on be this kernel's."""
        self.launched, self._starts_early = Writer(name), starts_early
        yield
        self._end_program()
        self.writers, self.launched = [self.launched], None
        if starts_early:
            self.met.add(name)

    def begin_program(self) -> None:
        self._end_program()
        self._early = [] if self._starts_early else None

    def _end_program(self) -> None:
        if self._early is not None:
            raise EarlyRead(f"a program of {self.launched.name} ends without a wait")

    def wait(self) -> None:
        early, self._early = self._early or [], None
        for read in early:
            for writer in self.writers:
                if writer.has_written(read):
                    raise EarlyRead(f"{self.launched.name} reads before its wait what {writer.name} writes")

    def let_next_in(self) -> None:
        if self._early is not None:
            raise EarlyRead(f"{self.launched.name} lets the next kernel in before its wait")

    def load(self, pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        if self._early is not None:
            self._early.append(_ranges(pointers, mask, size))

    def store(self, pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        if self._early is not None:
            raise EarlyRead(f"{self.launched.name} writes before its wait")
        self.launched.written.append(_ranges(pointers, mask, size))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Note what an operation of torch, any copy among them, writes behind the last launch."""
        made = func(*args, **(kwargs or {}))
        if self.launched is None and "empty" not in func.__name__:
            returned = made if isinstance(made, tuple | list) else [made]
            for tensor, result in zip(returned, func._schema.returns, strict=False):
                is_written = result.alias_info is None or result.alias_info.is_write
                if isinstance(tensor, torch.Tensor) and is_written and tensor.numel():
                    begin = tensor.data_ptr()
                    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
                    end = begin + (last + 1) * tensor.element_size()
                    self.writers.append(Writer(func.__name__, [np.array([[begin, end]], np.uint64)]))
        return made


def _ranges(pointers: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
    begin = np.unique(np.broadcast_to(pointers, mask.shape)[mask.astype(bool)])
    return np.stack((begin, begin + np.uint64(size)), 1)


@contextmanager
def watched():
    """Have kernels be launched to start early, and refuse what they may not do then."""
    from triton.runtime import interpreter

    watch, builder, executor = Watch(), interpreter.InterpreterBuilder, interpreter.GridExecutor
    launch, set_program = executor.__call__, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store

    def launched(self, *args, **kwargs):
        with watch.launch(self.fn.__name__, kwargs.get("PDL", False)):
            return launch(self, *args, **kwargs)

    def begun(self, *place):
        watch.begin_program()
        return set_program(self, *place)

    def loaded(self, pointers, mask, *others):
        watch.load(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8)
        return load(self, pointers, mask, *others)

    def stored(self, pointers, value, mask, *others):
        watch.store(pointers.data, mask.data, pointers.get_element_ty().primitive_bitwidth // 8)
        return store(self, pointers, value, mask, *others)

    functions = interpreter.InterpretedFunction.rewritten_fn
    with pytest.MonkeyPatch.context() as patch, watch:
        patch.setattr(pdl, "target_of", lambda place: Target(has_dependent_launches=True))
        patch.setattr(executor, "__call__", launched)
        patch.setattr(builder, "set_grid_idx", begun)
        patch.setattr(builder, "create_masked_load", loaded)
        patch.setattr(builder, "create_masked_store", stored)
        patch.setitem(functions, pdl.wait_for_inputs.fn, lambda PDL: watch.wait())
        patch.setitem(functions, pdl.let_next_in.fn, lambda PDL: watch.let_next_in())
        patch.setitem(functions, pdl.ask_for.fn, lambda pointers: None)  # into a cache, which a later writer changes
        yield watch
