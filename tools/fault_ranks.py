"""What the ranks of `tools.faults` do: one of them has a fault while the others are in the middle of something.

Under torchrun this is the script: `torchrun ... -m tools.fault_ranks FOLDER BACKEND FAULT WAY VICTIM SECONDS`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import gradmesh as gm

LONG = 600.0
SETTLE = 0.4
"""Seconds that the others have to get into the middle of it."""


# ---- what is under way


def _call(group: dist.ProcessGroup, _: int) -> None:
    gm.all_reduce(torch.ones(3), group, dst=gm.I)


def _asynchronous(group: dist.ProcessGroup, _: int) -> None:
    work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    if work is not None:
        work.wait()


def _message(group: dist.ProcessGroup, victim: int) -> None:
    if dist.get_rank() == victim:
        for other in range(dist.get_world_size()):
            if other != victim:
                dist.send(torch.ones(3), other, group=group)
    else:
        dist.recv(torch.ones(3), victim, group=group)


def _forward(group: dist.ProcessGroup) -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    return gm.all_gather(x, group).square().sum()


WAYS: dict[str, Callable[[dist.ProcessGroup, int], None]] = {
    "call": _call,
    "asynchronous call": _asynchronous,
    "message": _message,
    "backward pass": lambda _group, _victim: None,  # its forward half is made by all, see `take_part`
}


# ---- what happens to the victim


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raises() -> None:
    raise ValueError("the fault")


def _returns() -> None:
    pass


def _slow() -> None:
    time.sleep(1.5)


def _stuck() -> None:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:  # in short sleeps, which end with a thread
        time.sleep(0.05)


FAULTS: dict[str, Callable[[], None]] = {
    "killed": _killed,
    "raises": _raises,
    "returns early": _returns,
    "slow": _slow,
    "stuck": _stuck,
    "launcher killed": _stuck,
    "no memory": _returns,
}


# ---- a rank


def opened_in_dev_shm() -> list[str]:
    """The files in /dev/shm that this process has open or mapped; others may come and go meanwhile."""
    with open("/proc/self/maps") as maps:
        names = [line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")]
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listdir used is gone
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted({name for name in names if name.startswith("/dev/shm/")})


def take_part(folder: str, fault: str, way: str, victim: int, seconds: float) -> None:
    """Be a rank of the trial, and note in a file of its own how that ends."""
    rank = dist.get_rank()
    notes: dict[str, object] = {"pid": os.getpid(), "thread": threading.current_thread().name}

    def note(**more: object) -> None:
        notes.update(more, when=time.monotonic(), files=opened_in_dev_shm())
        temporary = Path(folder, f".{rank}")
        temporary.write_text(json.dumps(notes))
        temporary.rename(Path(folder, str(rank)))

    try:
        with _out_of_memory() if fault == "no memory" and rank == victim else contextlib.nullcontext():
            group = dist.new_group(timeout=datetime.timedelta(seconds=seconds))
        loss = _forward(group)
        gm.all_reduce(torch.ones(1), group, dst=gm.I)
        note(ended="not yet")
        if rank == victim:
            time.sleep(SETTLE)
            note(fault=time.monotonic())
            FAULTS[fault]()
            if fault == "returns early":
                return
        WAYS[way](group, victim)
        if way == "backward pass":
            loss.backward()
    except BaseException as error:
        note(ended="error", kind=type(error).__name__, text=_plain(str(error)))
        raise
    note(ended="returned")


@contextlib.contextmanager
def _out_of_memory() -> Iterator[None]:
    """Let nothing large be mapped by this process any more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _plain(text: str) -> str:
    """An error's text with what differs from run to run left out."""
    return re.sub(r"process \d+", "process N", text)


def main() -> None:
    """Be a rank that torchrun started."""
    folder, backend, fault, way, victim, seconds = sys.argv[1:]
    signal.signal(
        signal.SIGTERM, signal.SIG_IGN
    )  # torchrun ends the others; here they show what they raise themselves
    torch.set_num_threads(1)
    gm.init(backend)
    take_part(folder, fault, way, int(victim), float(seconds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
