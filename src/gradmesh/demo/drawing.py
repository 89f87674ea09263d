"""Seeded initialization on ranks that may share a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]

_LOCK = threading.RLock()
"""Thread ranks share torch's default generator and dtype."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator, for one rank at a time, and restore it afterwards."""
    with _LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
