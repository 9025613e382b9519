"""The models. To add one, add a file here.

When a model is first looked up, every module of this folder is imported and registers its classes.
"""

from typing import TYPE_CHECKING

from nanoinfer.common.lazy import lazy_names

if TYPE_CHECKING:  # what type checkers and editors see of the names below
    from nanoinfer.models.base import DecoderModel, ModelSpec
    from nanoinfer.models.registry import find_class, register, resolve, supported_architectures

__all__ = ["DecoderModel", "ModelSpec", "find_class", "register", "resolve", "supported_architectures"]

# The known shapes (`models.shapes`) are read where torch is not wanted.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "base": ["DecoderModel", "ModelSpec"],
        "registry": ["find_class", "register", "resolve", "supported_architectures"],
    },
)
