"""What the second run of the same calls has to meet: the random numbers and the buffers of the first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Replay"]


class Replay:
    """Calls that are run once more, one after another, from where they began."""

    def __init__(self, modules: Iterable[nn.Module], inputs: Iterable[Tensor]) -> None:
        """Keep what the modules' calls may change.

        Args:
            modules: what the calls are made of; of those in training the buffers are kept.
            inputs: of the calls, whose devices' random numbers they may draw.
        """
        every = {id(part): part for module in modules for part in module.modules()}.values()
        here = [*inputs, *(p for part in every for p in part.parameters(recurse=False))]
        found = {x.device.index for x in here if x.is_cuda}
        # Where the inputs are still to be moved.
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
        """Keep the random numbers that the next call of the first run will draw."""
        self._states.append((torch.get_rng_state(), [torch.cuda.get_rng_state(d) for d in self._devices]))

    @torch.no_grad()
    def rewind(self) -> None:
        """Put back the buffers that the first run changed, which the second one then changes alike."""
        for part, name, x, before in self._buffers:
            # Batch norm writes its own without counting it; and what was not written others may have saved.
            if not torch.equal(x, before):
                x.copy_(before)
            if getattr(part, name) is not x:
                setattr(part, name, x)

    @contextlib.contextmanager
    def numbers(self, call: int) -> Iterator[None]:
        """Have this call draw what it drew in the first run, and all that follows what it would."""
        here, there = self._states[call]
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(here)
            for device, state in zip(self._devices, there, strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
