"""What the system says of a machine's GPUs and their drivers, for who looks for what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import torch


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the version of NVIDIA's driver, None if there is none."""
    try:
        said = (root / "proc/driver/nvidia/version").read_text()
    except OSError:  # under WSL2 the driver is that of Windows
        if shutil.which("nvidia-smi") is None:
            return None
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout
        except (OSError, subprocess.TimeoutExpired):
            return None
    match = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", said)
    return match[0] if match else None


def pcie_lanes(device: torch.device, root: Path = Path("/")) -> tuple[int, int] | None:
    """Return how many lanes the GPU's slot has and how many the GPU could use; None if the system does not say."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        folder = root / "sys/bus/pci/devices" / name
        now, most = (int((folder / f"{which}_link_width").read_text()) for which in ("current", "max"))
    except (AttributeError, OSError, ValueError):
        return None
    return (now, most) if now else None  # 0: of a virtual machine


def torch_build() -> str:
    """Return what torch is built for."""
    if torch.version.hip:
        return f"for ROCm {torch.version.hip}"
    return f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"


def why_no_gpu(driver: str | None) -> tuple[str, bool]:
    """Return why torch sees no GPU, with what to do, and whether one is there. driver: its version, None for none."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    is_there = driver is not None and not is_hidden  # a driver says that there is one
    if torch.version.cuda is None:
        return "torch is built without CUDA: install a CUDA build of it (https://pytorch.org)", is_there
    if is_hidden:
        return "CUDA_VISIBLE_DEVICES hides all GPUs: unset it", False
    if driver is None:
        return "no NVIDIA driver is found: install one, or give the container the GPU (docker run --gpus all)", False
    return f"torch sees none with driver {driver}: it may be too old for CUDA {torch.version.cuda}", is_there
