"""What every test starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """Tests that draw numbers draw the same ones alone and in any order."""
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--fuzz", action="store_true", help="every seed and every line, not a sample: minutes to an hour")


@pytest.fixture(scope="session")
def fuzz(request) -> bool:
    """Whether random tests take all that they can draw from."""
    return request.config.getoption("--fuzz")
