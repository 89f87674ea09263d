"""Events that ranks wait for apart from the calls under test, where a sleep would have to be long enough."""

from __future__ import annotations

import time
import uuid

import torch.distributed as dist


class StoreEvent:
    """An event on one rank that others wait for, through the store of their world.

    It is polled: a thread that waits in C++ cannot be ended, and a rank in a barrier would count as one that waits for
    the call under test.
    """

    def __init__(self) -> None:
        self._key = f"event {uuid.uuid4().hex}"

    def set(self) -> None:
        dist.distributed_c10d._get_default_store().set(self._key, "")

    def wait(self, seconds: float = 60.0) -> None:
        store, deadline = dist.distributed_c10d._get_default_store(), time.monotonic() + seconds
        while not store.check([self._key]):
            assert time.monotonic() < deadline, f"no rank has set the event in {seconds:g} s"
            time.sleep(0.01)
