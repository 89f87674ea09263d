"""Parameters drawn from a seed, on ranks that may share a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["seeded"]

_ONE_AT_A_TIME = threading.RLock()
"""Ranks that are threads share torch's default dtype."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch's default generator begin at a seed, for one rank at a time, and leave it as it was."""
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
