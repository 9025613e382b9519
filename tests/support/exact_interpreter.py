"""Triton's interpreter with sums and exponentials of one set of bits: those of the loops in `expert_cases`."""

from __future__ import annotations

import numpy as np
import pytest


def make_interpreter_exact(patch: pytest.MonkeyPatch) -> None:
    """Products add their columns one by one, ascending, in float32. The library's order depends on the tiles."""
    from triton.runtime import interpreter

    handle = interpreter.TensorHandle

    def dot(self, a, b, d, *_):
        left, right, acc = a.data.astype(np.float32), b.data.astype(np.float32), d.data
        with np.errstate(invalid="ignore", over="ignore"):
            for column in range(left.shape[1]):
                acc = acc + left[:, column, None] * right[None, column]
        return handle(acc, d.dtype.scalar)

    def exp(self, x):
        with np.errstate(over="ignore"):
            return handle(np.exp(x.data.astype(np.float64)).astype(x.data.dtype), x.dtype)

    patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    patch.setattr(interpreter.InterpreterBuilder, "create_exp", exp)
