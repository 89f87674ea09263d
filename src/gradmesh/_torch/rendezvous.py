"""Rendezvous from the environment (`env://`), for which torch would create a TCPStore on all interfaces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, urlparse

from gradmesh._torch.names import find

__all__ = ["join_through"]

_handlers: dict[str, Callable[..., Iterator[tuple[Any, int, int]]]] | None = find(
    "torch.distributed.rendezvous._rendezvous_handlers",
    without="a launched rank that calls init_process_group again creates a store that listens on all interfaces",
)


def join_through(store: Callable[[], Any]) -> None:
    """Use a given store whenever this process joins a world from its environment.

    Args:
        store: creates the store for one world.
    """

    def handler(url: str, **_: object) -> Iterator[tuple[Any, int, int]]:
        query = {name: values[0] for name, values in parse_qs(urlparse(url).query).items()}
        rank = int(query.get("rank", os.environ["RANK"]))
        yield store(), rank, int(query.get("world_size", os.environ["WORLD_SIZE"]))

    if _handlers is not None:
        _handlers["env"] = handler
