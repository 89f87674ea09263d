"""What ranks do on GPUs, for test_gpus.py: verbs on a stream of their own, and a race for the sanitizer to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

import gradmesh as gm

__all__ = ["VERBS", "on_external_stream", "on_side_stream", "race", "values"]

VERBS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_gather": lambda x: gm.all_gather(x),
    "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
    "max": lambda x: gm.all_reduce(x, op="max", dst=gm.I),
    "all_to_all": lambda x: gm.all_to_all(x),
    "broadcast": lambda x: gm.broadcast(x),
    "halo_exchange": lambda x: gm.halo_exchange(x),
    "reduce_scatter": lambda x: gm.reduce_scatter(x),
    "scan": lambda x: gm.scan(x),
    "shift": lambda x: gm.shift(x),
    "later": lambda x: gm.all_gather(x, async_op=True).wait(),
}


def values(device: str) -> dict[str, tuple[list[float], list[float]]]:
    """Each verb's result and gradient, on the stream that is current."""
    found = {}
    for name, verb in VERBS.items():
        generator = torch.Generator().manual_seed(gm.rank())
        # Finished on this stream before anything else begins, since it comes from the host's memory.
        x = torch.randn(4 * gm.world_size(), generator=generator).to(device).requires_grad_()
        y = verb(x)
        ((1 + gm.rank()) * y**2).sum().backward()
        assert x.grad is not None
        found[name] = y.detach().cpu().tolist(), x.grad.cpu().tolist()
    return found


@contextmanager
def _behind(stream: torch.cuda.Stream) -> Iterator[None]:
    """Work on a stream that waits for pending calls, and which the rest waits for."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def on_side_stream() -> bool:
    """Whether the verbs give on a stream of torch's pool what they give on the default one."""
    expected = values("cuda")
    with _behind(torch.cuda.Stream()):
        found = values("cuda")
    return found == expected


def on_external_stream() -> bool:
    """The same on an external stream; here it is torch's own, by its address."""
    expected = values("cuda")
    owner = torch.cuda.Stream()  # has to live as long as the other name for it
    with _behind(torch.cuda.ExternalStream(owner.cuda_stream, device=owner.device)):
        found = values("cuda")
    return found == expected


def race() -> None:
    """The operand is written on the default stream while a verb reads it on another, without waiting."""
    x = torch.ones(1024, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        gm.all_gather(x)
    x.add_(1)
