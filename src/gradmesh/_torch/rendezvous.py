"""How a process finds the others when it joins a world from its environment (`env://`).

torch makes a TCPStore at MASTER_ADDR for that, which listens on every interface of the host.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

from gradmesh._torch.names import find

__all__ = ["join_through"]

_handlers: dict[str, Callable[..., Iterator[tuple[Any, int, int]]]] | None = find(
    "torch.distributed.rendezvous._rendezvous_handlers",
    without="a launched rank that leaves its world and joins one again makes a store that listens on all interfaces",
)


def join_through(store: Callable[[], Any]) -> None:
    """Have this process find the others through a store of the caller's whenever it joins a world from its environment.

    Args:
        store: makes the store for one joining.
    """

    def handler(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
        said = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        rank = int(said.get("rank", os.environ["RANK"]))
        yield store(), rank, int(said.get("world_size", os.environ["WORLD_SIZE"]))

    if _handlers is not None:
        _handlers["env"] = handler
