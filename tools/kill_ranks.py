"""End ranks of the shm backend while the others wait for them, and print how soon those notice.

The ranks are forked from this process, which has imported torch and made no group: so a world starts in a tenth of a
second. Each survivor reports its own exception and when it was raised, then holds still until the trial is over.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gradmesh  # noqa: F401  it makes the backend known
from tools.fault_ranks import opened_in_dev_shm

LARGE = 1 << 21
"""Elements of a message that fits in no ring and takes several chunks."""
PATIENCE = 10.0
"""Seconds that a survivor may take before it counts as one that noticed nothing."""
START = 60.0
"""Seconds for the ranks to start."""


@dataclasses.dataclass(frozen=True)
class Notice:
    """What a survivor raised."""

    rank: int  # the survivor
    seconds: float  # between the end of the victim and the exception
    kind: str  # the exception's class
    named: int | None  # the rank that the exception names in its attribute
    text: str  # the exception's text


@dataclasses.dataclass(frozen=True)
class Trial:
    """One world, and what became of it."""

    waits: str  # what the survivors did
    ending: str  # how the victim ended
    victim: int  # its rank
    size: int  # the number of ranks
    notices: list[Notice]  # what the survivors raised, in rank order
    # files in /dev/shm that a rank used, and ranks whose process did not end by itself
    left_behind: list[str]


# ---- what the survivors wait in


def _all_reduce(_: int) -> None:
    dist.all_reduce(torch.ones(3))


def _large_all_reduce(_: int) -> None:
    dist.all_reduce(torch.ones(LARGE))


def _barrier(_: int) -> None:
    dist.barrier()


def _recv(victim: int) -> None:
    dist.recv(torch.empty(1), victim)


def _send(victim: int) -> None:
    dist.send(torch.ones(LARGE), victim)


def _polled_all_reduce(_: int) -> None:
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    while not work.is_completed():
        time.sleep(0.001)
    work.wait()


WAITS: dict[str, Callable[[int], None]] = {
    "all_reduce": _all_reduce,
    "large all_reduce": _large_all_reduce,
    "barrier": _barrier,
    "recv": _recv,
    "send": _send,
    "polled all_reduce": _polled_all_reduce,
}
RANDOM = "random calls"


def _random_calls(seed: int) -> None:
    """Random collectives and messages around the ring, the same on every rank, until one fails."""
    calls = random.Random(seed)
    rank, size = dist.get_rank(), dist.get_world_size()
    while True:
        kind = calls.choice(("all_reduce", "all_gather", "broadcast", "all_to_all", "barrier", "ring"))
        count = calls.choice((1, 1000, 50_000, 600_000))
        x = torch.ones(count)
        if kind == "all_reduce":
            dist.all_reduce(x)
        elif kind == "all_gather":
            dist.all_gather([torch.empty(count) for _ in range(size)], x)
        elif kind == "broadcast":
            dist.broadcast(x, calls.randrange(size))
        elif kind == "all_to_all":
            dist.all_to_all_single(torch.empty(size * count), torch.ones(size * count))
        elif kind == "barrier":
            dist.barrier()
        else:
            sent = dist.isend(x, (rank + 1) % size)
            dist.recv(torch.empty(count), (rank - 1) % size)
            assert sent is not None
            sent.wait()


# ---- one world


def _rank(
    rank: int,
    size: int,
    victim: int,
    store: str,
    waits: str,
    ending: str,
    seed: int,
    say: Callable[..., None],
) -> None:
    dist.init_process_group(
        "shm",
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=6 * PATIENCE),
    )
    dist.barrier()
    say("ready", files=opened_in_dev_shm())
    if rank == victim and waits != RANDOM:
        if ending == "killed":
            time.sleep(6 * PATIENCE)
        time.sleep(0.3)
        say("ended", when=time.monotonic())
        if ending == "exits":
            os._exit(0)
        dist.destroy_process_group()
        time.sleep(6 * PATIENCE)
    try:
        _random_calls(seed) if waits == RANDOM else WAITS[waits](victim)
    except Exception as error:
        named = getattr(error, "rank", None)
        say("raised", when=time.monotonic(), kind=type(error).__name__, named=named, text=str(error))
    else:
        say("returned")


def _fork(hold: tuple[int, int], body: Callable[[Callable[..., None]], None]) -> tuple[int, int]:
    """Fork a rank; its process and the end of the pipe from which its lines come."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    code = 1
    try:
        os.close(reader)
        os.close(hold[1])

        def say(what: str, **more: object) -> None:
            os.write(writer, json.dumps({"what": what, **more}).encode() + b"\n")

        body(say)
        os.close(writer)
        os.read(hold[0], 1)  # until the parent closes its end
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


class _Lines:
    """What the ranks say, line by line."""

    def __init__(self, readers: Sequence[int]) -> None:
        self._text = dict.fromkeys(readers, b"")
        self._rank = {reader: rank for rank, reader in enumerate(readers)}
        self.said: list[dict[str, Any]] = [{} for _ in readers]

    def wait(self, over: Callable[[list[dict[str, Any]]], bool], seconds: float) -> bool:
        """Read until `over` what was said; whether it came in time. Each word is kept with what came with it."""
        deadline = time.monotonic() + seconds
        while not over(self.said):
            ready, _, _ = select.select(list(self._text), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return False
            for reader in ready:
                part = os.read(reader, 1 << 16)
                if not part:
                    del self._text[reader]
                    continue
                *lines, self._text[reader] = (self._text[reader] + part).split(b"\n")
                for line in lines:
                    word = json.loads(line)
                    self.said[self._rank[reader]][word.pop("what")] = word
        return True


def _reap(pids: Sequence[int], seconds: float) -> list[str]:
    """Wait for the ranks' processes; those that had to be killed."""
    deadline = time.monotonic() + seconds
    stubborn = []
    for rank, pid in enumerate(pids):
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                stubborn.append(f"the process of rank {rank}")
                break
            time.sleep(0.002)
    return stubborn


def trial(waits: str, ending: str, size: int, chance: random.Random) -> Trial:
    """Start a world, end one of its ranks, and collect what the others raise. For a process of one thread.

    The victim is "killed", "exits" as a process that returns, or "leaves": it destroys the group and lives on.
    """
    victim, seed, moment = chance.randrange(size), chance.randrange(1 << 30), chance.uniform(0.0, 0.3)
    hold = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        world = [
            _fork(
                hold,
                lambda say, rank=rank: _rank(  # type: ignore[misc]
                    rank, size, victim, f"{folder}/store", waits, ending, seed, say
                ),
            )
            for rank in range(size)
        ]
        pids, readers = [pid for pid, _ in world], [reader for _, reader in world]
        lines = _Lines(readers)
        survivors = [rank for rank in range(size) if rank != victim]
        try:
            if not lines.wait(lambda said: all("ready" in words for words in said), START):
                raise RuntimeError(f"the ranks did not start: {lines.said}")
            if ending == "killed":
                time.sleep(moment)
                ended = time.monotonic()
                os.kill(pids[victim], signal.SIGKILL)
            elif lines.wait(lambda said: "ended" in said[victim], START):
                ended = lines.said[victim]["ended"]["when"]
            else:
                raise RuntimeError(f"the victim did not end: {lines.said}")
            lines.wait(lambda said: all({"raised", "returned"} & {*said[r]} for r in survivors), PATIENCE)
        finally:
            os.close(hold[1])
            if ending == "leaves":  # it sleeps
                os.kill(pids[victim], signal.SIGKILL)
            left = _reap(pids, PATIENCE / 2)
            for fd in (hold[0], *readers):
                os.close(fd)
    left += sorted({name for words in lines.said for name in words["ready"]["files"]})
    raised = [(rank, lines.said[rank]["raised"]) for rank in survivors if "raised" in lines.said[rank]]
    notices = [Notice(rank, word.pop("when") - ended, **word) for rank, word in raised]
    return Trial(waits, ending, victim, size, notices, left)


# ---- many worlds


def kill_ranks(
    times: int, size: int = 3, seed: int = 0, waits: Sequence[str] = (RANDOM,), ending: str = "killed"
) -> list[Trial]:
    """End a random rank at a random moment, so many times, in a process of its own."""
    command = [sys.executable, "-m", "tools.kill_ranks", "--json", f"--times={times}", f"--ranks={size}"]
    command += [f"--seed={seed}", f"--ending={ending}", *(f"--waits={name}" for name in waits)]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True, timeout=60 + 30 * times)
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    return [Trial(**{**each, "notices": [Notice(**n) for n in each["notices"]]}) for each in trials]


def main() -> None:
    """Run the trials, and print one line for all, or one for each with --json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--waits", action="append", choices=[*WAITS, RANDOM])
    parser.add_argument("--ending", default="killed", choices=["killed", "exits", "leaves"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    waits = options.waits or [RANDOM]
    trials = []
    for turn in range(options.times):
        trials.append(trial(waits[turn % len(waits)], options.ending, options.ranks, chance))
        if options.json:
            print(json.dumps(dataclasses.asdict(trials[-1])), flush=True)
    if not options.json:
        notices = [(each, notice) for each in trials for notice in each.notices]
        right = sum(notice.named == each.victim for each, notice in notices)
        slowest = max((notice.seconds for _, notice in notices), default=float("nan"))
        left = [name for each in trials for name in each.left_behind]
        print(
            f"{len(trials)} ranks {options.ending}: {len(notices)} of {len(trials) * (options.ranks - 1)} survivors "
            f"raised an error, {right} of them with the rank's name; the slowest after {slowest * 1e3:.0f} ms; "
            f"left behind: {left or 'nothing'}"
        )


if __name__ == "__main__":
    main()
