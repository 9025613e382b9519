"""Descriptions of devices, for what is planned on none."""

import torch

from nanoinfer.devices.registry import device_of

GPU, CPU = device_of(torch.device("cuda", 0)), device_of(torch.device("cpu"))
