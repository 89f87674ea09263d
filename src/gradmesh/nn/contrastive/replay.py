"""Restore random numbers and buffers for a second run of the same calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Replay"]


class Replay:
    """Snapshots of random number generators and buffers, for a second run of the same calls.

    Args:
        modules: the modules that are called; the buffers of those in training mode are saved.
        inputs: the arguments of the calls, whose devices' generators are saved.
    """

    def __init__(self, modules: Iterable[nn.Module], inputs: Iterable[Tensor]) -> None:
        every = {id(part): part for module in modules for part in module.modules()}.values()
        here = [*inputs, *(p for part in every for p in part.parameters(recurse=False))]
        found = {x.device.index for x in here if x.is_cuda}
        # The call may move its inputs to the current device.
        self._devices = sorted(
            found | ({torch.cuda.current_device()} if torch.cuda.is_initialized() else set())
        )
        self._states: list[Any] = []
        self._buffers = [
            (part, name, x, x.detach().clone())
            for part in every
            if part.training
            for name, x in part.named_buffers(recurse=False)
        ]

    def note(self) -> None:
        """Save the generators' states before a call of the first run."""
        self._states.append((torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self._devices]))

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the buffers that the first run changed."""
        for part, name, x, before in self._buffers:
            # Compare values: batch norm's writes do not change the version counter. Do not write unchanged buffers,
            # which other graphs may have saved.
            if not torch.equal(x, before):
                x.copy_(before)
            if getattr(part, name) is not x:
                setattr(part, name, x)

    @contextlib.contextmanager
    def numbers(self, call: int) -> Iterator[None]:
        """Use the random numbers of a call's first run; afterwards restore the current state."""
        here, there = self._states[call]
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(here)
            for device, state in zip(self._devices, there, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
