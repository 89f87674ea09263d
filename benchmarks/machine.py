"""What was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["machine"]


def machine() -> dict[str, str]:
    """The machine and its software, by what each is called."""
    return {
        "CPU": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _memory() -> str:
    total = _field("/proc/meminfo", "MemTotal").partition(" ")[0]
    return f"{int(total) / 2**20:.1f} GiB" if total.isdigit() else "unknown"


def _field(path: str, name: str) -> str:
    file = Path(path)
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
