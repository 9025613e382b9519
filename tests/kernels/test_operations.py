"""The two sets of device operations: who gets which, and that a caller cannot tell them apart."""

import inspect

import pytest
import torch

from nanoinfer.kernels import reference
from nanoinfer.kernels.operations import operations_of


def test_a_device_gets_kernels_only_on_cuda():
    pytest.importorskip("triton")
    from nanoinfer.kernels import fused

    assert operations_of("cuda") is operations_of("cuda:1") is operations_of(torch.device("cuda", 0)) is fused
    assert operations_of("cpu") is operations_of(torch.device("meta")) is reference


def test_both_sets_have_the_same_functions_and_parameters():
    pytest.importorskip("triton")
    from nanoinfer.kernels import fused

    names = [name for name, found in vars(fused).items() if inspect.isfunction(found)]
    assert {"linear", "norm_rope_store", "sample_rows"} < set(names)
    for name in names:
        plain, kernel = (inspect.signature(getattr(module, name)).parameters for module in (reference, fused))
        assert list(plain) == [parameter for parameter in kernel if parameter in plain], name
        assert all(kernel[parameter].default is not inspect.Parameter.empty for parameter in kernel.keys() - plain), (
            name
        )
