"""Triton's interpreter with what it computes again and again computed once: half of its time and more."""

from __future__ import annotations

import sys

import pytest


def make_interpreter_quick(patch: pytest.MonkeyPatch) -> None:
    """Each part is left as it is where Triton's insides are others, and then as slow as it is."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is None:
        return
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "GridExecutor"):
        _patch_language_once(interpreter, patch)
    if hasattr(interpreter, "_get_np_dtype"):
        _remember_numpy_types(interpreter, patch)
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    if hasattr(TritonSemantic, "binary_op_sanitize_overflow_impl"):
        _look_for_no_overflow(TritonSemantic, patch)
    _pass_over_what_stays(core, TritonSemantic, patch)

    sample = core.block_type(core.float32, [1])
    if vars(sample).keys() == {"element_ty", "shape", "numel", "name"} and isinstance(sample.shape, core.tuple):
        _remember_shapes(core, patch)
        if vars(core.tensor(None, sample)).keys() == {"handle", "shape", "numel", "type", "dtype"}:
            _remember_shapes_of_tensors(core, patch)


def _patch_language_once(interpreter, patch: pytest.MonkeyPatch) -> None:
    """triton.language is patched once per launch and module, not at every call of a device function."""
    launch, patch_lang, patched = interpreter.GridExecutor.__call__, interpreter._patch_lang, set()

    def launch_with_one_patch(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def patch_lang_once(fn):
        module = id(fn.__globals__)
        if module in patched:
            return None
        patched.add(module)
        return patch_lang(fn)

    patch.setattr(interpreter.GridExecutor, "__call__", launch_with_one_patch)
    patch.setattr(interpreter, "_patch_lang", patch_lang_once)


def _remember_numpy_types(interpreter, patch: pytest.MonkeyPatch) -> None:
    compute, pointer_type, known = interpreter._get_np_dtype, interpreter.tl.pointer_type, {}

    def get_np_dtype(dtype):
        scalar = dtype.scalar
        if isinstance(scalar, pointer_type):
            return compute(scalar)
        if scalar.name not in known:
            known[scalar.name] = compute(scalar)
        return known[scalar.name]

    patch.setattr(interpreter, "_get_np_dtype", get_np_dtype)


def _look_for_no_overflow(semantic, patch: pytest.MonkeyPatch) -> None:
    """Each sum of integers is computed in int64 as well, for an assertion that only exists while debugging."""
    look = semantic.binary_op_sanitize_overflow_impl

    def look_while_debugging(self, *args):
        if getattr(self.builder.options, "debug", True):
            look(self, *args)

    patch.setattr(semantic, "binary_op_sanitize_overflow_impl", look_while_debugging)


def _pass_over_what_stays(core, semantic, patch: pytest.MonkeyPatch) -> None:
    """A value that is no constexpr is not searched for one, and one that has the type already is not cast."""
    if hasattr(core, "_unwrap_if_constexpr"):
        unwrap, plain = core._unwrap_if_constexpr, {core.tensor, int, float, bool, str, type(None)}
        patch.setattr(core, "_unwrap_if_constexpr", lambda value: value if type(value) in plain else unwrap(value))
    cast = semantic.cast

    def cast_others(self, value, dtype, *args, **kwargs):
        return value if value.dtype is dtype else cast(self, value, dtype, *args, **kwargs)

    patch.setattr(semantic, "cast", cast_others)


def _remember_shapes(core, patch: pytest.MonkeyPatch) -> None:
    """A shape that was checked once is not checked again, nor written as text."""
    make, constexpr, tuple_of_triton, known = core.block_type.__init__, core.constexpr, core.tuple, {}

    def init(self, element_ty, shape):
        values = shape.values if isinstance(shape, tuple_of_triton) else shape
        sizes = tuple([value.value if isinstance(value, constexpr) else value for value in values])
        if sizes not in known:
            make(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, str(self.shape)
            return
        self.element_ty = element_ty
        self.shape, self.numel, text = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    patch.setattr(core.block_type, "__init__", init)


def _remember_shapes_of_tensors(core, patch: pytest.MonkeyPatch) -> None:
    """Each shape is one object by now, so that equal ones are seen without a look at their sizes."""
    from triton.language.semantic import TritonSemantic

    make, known = core.tensor.__init__, {}

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_others)

    def init(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    patch.setattr(core.tensor, "__init__", init)
