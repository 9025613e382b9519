"""Activations in plain torch."""

from functools import partial

import torch.nn.functional as F

# By the names that configs give them.
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}
