"""What our Triton kernels may count on, on one device."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    """What a device has for kernels that Triton compiles. Where it lacks something, kernels have another form of the
    same bits. The defaults are those of Triton's interpreter, which has nothing of it.

    Attributes:
        is_compiled: whether kernels are compiled; False: the interpreter runs them.
        num_cores: processors that run programs side by side, and two programs of decode in the interpreter.
        core_memory: bytes of shared memory of one of these.
        program_memory: the most bytes of shared memory that one program may take.
        has_dependent_launches: a kernel can start while the one before it still runs (`kernels/launch/pdl.py`).
        copies_tiles: a copy unit loads tiles that descriptors name.
        has_async_products: matrix units run on by themselves, and take an operand from registers in an order of theirs.
        has_instructions: kernels may be made of PTX, the instructions of `kernels/linear/instructions.py` among them.
        precision: what products of values narrower than float32 are called with; no bit depends on it, and compilers do
            not take the same.
        has_float8: kernels can read KV in fp8 (e4m3).
        least_rows: products of fewer rows than this are none for the matrix units, and are multiplied value by value.
    """

    is_compiled: bool = False
    num_cores: int = 2
    core_memory: int = 0
    program_memory: int = 0
    has_dependent_launches: bool = False
    copies_tiles: bool = False
    has_async_products: bool = False
    has_instructions: bool = False
    has_float8: bool = True
    precision: str = "tf32"
    least_rows: int = 8


INTERPRETER = Target()
