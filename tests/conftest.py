"""What every test starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Tests that draw numbers draw the same ones alone and in any order."""
    torch.manual_seed(0)
