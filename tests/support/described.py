"""Descriptions of devices, for what is planned on none."""

import torch

from nanoinfer.devices.registry import device_of
from nanoinfer.memory.proposals import Proposer

GPU, CPU = device_of(torch.device("cuda", 0)), device_of(torch.device("cpu"))


def without_proposals(monkeypatch) -> None:
    """Have forecasts name nothing that would help, each of which is a forecast of its own."""
    monkeypatch.setattr(Proposer, "to_fit", lambda self: ())
    monkeypatch.setattr(Proposer, "to_be_faster", lambda self, now: ())
