"""Give one rank a fault while the others are in the middle of something, and print how each of them ended.

Every survivor has to end within `LIMIT` seconds, with an error that names the rank that had the fault, and nothing may
be left behind: no process, no thread, no descriptor of the launcher, no file in /dev/shm. Against a rank that is stuck
in its own code only a timeout helps, so there the group has one of `SECONDS`; with a slow rank, all
ranks continue.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import gradmesh as gm
from tools.fault_ranks import FAULTS, WAYS, opened_in_dev_shm, take_part
from tools.pages import show

SIZE, VICTIM = 3, 1
SECONDS = 3.0
"""The timeout of the group where a rank is stuck."""
PATIENT = 60.0
"""The timeout of the group elsewhere, where no rank has to wait for it."""
LIMIT = 5.0
"""Seconds after the fault within which everybody has to have ended."""
BACKENDS = ("threads", "shm", "gloo")
ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One world, and what became of it."""

    started: str  # "launch" or "torchrun"
    backend: str  # of torch.distributed
    fault: str  # what happened to a rank, see `FAULTS`
    way: str  # what the others were in the middle of, see `WAYS`
    survivors: dict[int, str]  # what each of the others ended with: the first line of its error, or how else
    seconds: float  # from the fault to the end of the last survivor
    caller: str  # the first line of the error that the caller of the launch got
    stack: bool  # whether that error shows where the rank with the fault was
    left: list[str]  # what was left behind

    def short(self) -> list[str]:
        """What this trial falls short of."""
        problems = [f"left behind: {name}" for name in self.left]
        if self.seconds > LIMIT + (self.fault == "stuck") * SECONDS:
            problems.append(f"took {self.seconds:.1f} s")
        if self.fault == "slow":
            return problems + [f"rank {r}: {end}" for r, end in self.survivors.items() if end != "returned"]
        named = _names(self.caller)
        if self.fault != "launcher killed" and self.started == "launch" and not named:
            problems.append(f"the caller's error does not name the rank: {self.caller}")
        for rank, end in self.survivors.items():
            if end == "returned":
                problems.append(f"rank {rank} noticed nothing")
            elif not _names(end) and not (end.startswith("ended by") or (named and self.backend == "gloo")):
                problems.append(f"rank {rank}'s error does not name the rank: {end}")
        if self.fault == "stuck" and self.started == "launch" and not self.stack:
            problems.append("no stack of the rank that is stuck")
        return problems


def _names(text: str) -> bool:
    return re.search(rf"\branks? {VICTIM}\b", text) is not None


def _first(text: str) -> str:
    return text.splitlines()[0].removeprefix("gradmesh: ").removeprefix("gradmesh.launch: ") if text else ""


# ---- one world


def trial(backend: str, fault: str, way: str, started: str = "launch") -> Trial:
    """Run one world."""
    before = _held()
    with tempfile.TemporaryDirectory() as folder:
        if started == "torchrun":
            text = caller = _under_torchrun(folder, backend, fault, way)
        elif fault == "launcher killed":
            caller, text = "", _killing_the_launcher(folder, backend, fault, way)
        else:
            text = _launched(folder, backend, fault, way)
            caller = _first(text)
        over = time.monotonic()
        notes = {int(p.name): json.loads(p.read_text()) for p in Path(folder).iterdir() if p.name.isdigit()}
    left = _left(notes, before, backend)
    survivors, ends = {}, []
    began = notes.get(VICTIM, {}).get("fault") or notes.get(VICTIM, {}).get("when", over)
    for rank in sorted(set(range(SIZE)) - {VICTIM}):
        said = notes.get(rank, {"ended": "not yet"})
        if said["ended"] == "error":
            survivors[rank] = f"{said['kind']}: {_first(said['text'])}"
        else:
            by = "the end of the launcher" if fault == "launcher killed" else "the launcher"
            survivors[rank] = f"ended by {by}" if said["ended"] == "not yet" else said["ended"]
        ends.append(over if said["ended"] == "not yet" else said["when"])
    return Trial(
        started,
        backend,
        fault,
        way,
        survivors,
        max(ends) - began,
        re.sub(r"process \d+", "process N", caller),
        f"Stack of rank {VICTIM}:" in text and "fault_ranks.py" in text,
        left,
    )


def _timeout(fault: str) -> float:
    return SECONDS if fault == "stuck" else PATIENT


def _launched(folder: str, backend: str, fault: str, way: str) -> str:
    args = (folder, fault, way, VICTIM, _timeout(fault))
    try:
        gm.launch(take_part, SIZE, backend=backend, args=args, timeout=60)
    except gm.RankError as error:
        return str(error)
    return ""


def _killing_the_launcher(folder: str, backend: str, fault: str, way: str) -> str:
    launcher = multiprocessing.get_context("fork").Process(
        target=_launched, args=(folder, backend, fault, way)
    )
    launcher.start()
    _wait(lambda: "fault" in _note(folder, VICTIM), 60)
    os.kill(launcher.pid or 0, signal.SIGKILL)
    launcher.join()
    pids = [_note(folder, rank).get("pid") for rank in range(SIZE)]
    _wait(lambda: not any(isinstance(pid, int) and _alive(pid) for pid in pids), LIMIT)
    return ""


def _under_torchrun(folder: str, backend: str, fault: str, way: str) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={SIZE}", "--nnodes=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}", "-m", "tools.fault_ranks"]
    command += [folder, backend, fault, way, str(VICTIM), str(_timeout(fault))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=errors
        ) as agent,
    ):
        if fault == "launcher killed":
            _wait(lambda: "fault" in _note(folder, VICTIM), 60)
            agent.kill()
        if fault in ("launcher killed", "stuck"):
            _wait(
                lambda: all(_note(folder, r).get("ended") == "error" for r in range(SIZE) if r != VICTIM), 60
            )
            os.kill(int(str(_note(folder, VICTIM)["pid"])), signal.SIGKILL)  # no other process ends it now
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(60)
        agent.terminate()
        agent.wait()
        errors.seek(0)
        cause = re.search(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", errors.read(), re.DOTALL)
        return f"the root cause is rank {cause[1]}, exit code {cause[2]}" if cause else ""


def _note(folder: str, rank: int) -> dict[str, object]:
    with contextlib.suppress(FileNotFoundError):
        said: dict[str, object] = json.loads(Path(folder, str(rank)).read_text())
        return said
    return {}


def _wait(over: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not over() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _held() -> tuple[set[str], set[int]]:
    """What this process has in /dev/shm, its descriptors, and its threads."""
    held = set(opened_in_dev_shm())
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            held.add(f"descriptor {fd} {os.readlink(f'/proc/self/fd/{fd}')}")
    return held, {thread.ident or 0 for thread in threading.enumerate()}


def _left(notes: dict[int, dict[str, object]], before: tuple[set[str], set[int]], backend: str) -> list[str]:
    left = {str(name) for said in notes.values() for name in said.get("files", [])}  # type: ignore[attr-defined]
    if backend != "threads":
        pids = {rank: int(str(said["pid"])) for rank, said in notes.items()}
        _wait(lambda: not any(map(_alive, pids.values())), 1.0)
        left |= {f"the process of rank {rank}" for rank, pid in pids.items() if _alive(pid)}
    own = [
        t for t in threading.enumerate() if t.ident not in before[1] and t.name.startswith("gradmesh rank")
    ]
    left |= {f"thread {thread.name}" for thread in own}
    return sorted((left | _held()[0]) - before[0])


# ---- many worlds


def _cells(backends: Sequence[str], started: str) -> Iterator[tuple[str, str, str]]:
    for backend in backends:
        for fault in FAULTS:
            if backend == "threads" and fault in ("killed", "launcher killed", "no memory"):
                continue  # it would be the whole process
            if fault == "no memory" and (backend != "shm" or started == "torchrun"):
                continue
            ways = list(WAYS)
            if started == "torchrun" or fault in ("launcher killed", "no memory"):
                ways = ["call", "backward pass"] if fault in ("killed", "returns early") else ["call"]
            for way in ways:
                yield backend, fault, way


def trials(backends: Sequence[str] = BACKENDS, started: str = "launch") -> Iterator[Trial]:
    """Run every fault with everything that may be under way."""
    for backend, fault, way in _cells(backends, started):
        yield trial(backend, fault, way, started)


def _brief(text: str) -> str:
    """An error without the place in Gloo's sources, its port, and its advice."""
    text = re.sub(r"\[/[^\]]*\] ", "", text)
    return re.sub(r"(closed by peer) .*", r"\1", text)


def table(results: Sequence[Trial]) -> str:
    """The trials as a Markdown table."""
    lines = [
        "| the rank | the others are in a | how they end | after, s | what the caller gets | left behind |",
        "|---|---|---|---|---|---|",
    ]
    for each in results:
        ends: dict[str, list[str]] = {}
        for rank, end in each.survivors.items():
            ends.setdefault(_brief(end), []).append(str(rank))
        shown = "; ".join(f"{', '.join(ranks)}: {end}" for end, ranks in ends.items())
        caller = _brief(each.caller) + (" (and its stack)" if each.stack else "")
        cells = (
            each.fault,
            each.way,
            shown,
            f"{each.seconds:.1f}",
            caller,
            ", ".join(each.left) or "nothing",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


PAGE = """# Rank failures: what the other ranks receive

What happens to the other ranks, and what the caller receives, when one rank is killed, raises, returns early, is slow
or is stuck during a collective, an async call, a message or a backward pass. Written by
`python -m tools.report docs/reports/faults.md`, which gives rank {victim} of {size} the fault.

A slow rank is waited for. A rank stuck in user code is caught by the timeout of the group, which was {seconds:g} s here
(the default is 300 s); the launcher's error then contains the Python stack of that rank. "Ended by the launcher" means
that the rank was still waiting when `gradmesh.launch`, or torchrun, ended it because of the failed rank.

Gloo's own errors do not name the failed rank. The verbs of gradmesh determine it: a rank whose call failed records that
in the store, and the error names the ranks without a record. Calls of torch.distributed itself (here the async call and
the message) raise Gloo's error; `gradmesh.launch` still reports the rank.

torch {torch}, {falls}

{parts}
"""


def page(results: Sequence[Trial]) -> str:
    """The page of the docs."""
    parts = []
    for started in ("launch", "torchrun"):
        for backend in BACKENDS:
            some = [each for each in results if (each.started, each.backend) == (started, backend)]
            if some:
                title = "gradmesh.launch" if started == "launch" else "torchrun"
                parts.append(f"## {backend}, under {title}\n\n{table(some)}")
    short = [(each, problem) for each in results for problem in each.short()]
    worlds = len({id(each) for each, _ in short})
    falls = f"{len(results)} worlds, {worlds or 'none'} of which fell short." + "\n" * bool(short)
    falls += "".join(
        f"\n* {e.backend}, {e.started}, {e.fault}, {e.way}: {_brief(problem)}" for e, problem in short
    )
    return PAGE.format(
        victim=VICTIM,
        size=SIZE,
        seconds=SECONDS,
        torch=torch.__version__,
        falls=falls,
        parts="\n\n".join(parts),
    )


def _kept(file: Path) -> list[Trial]:
    """The trials that a file has, the last of each kind, in the order of the tables."""
    rows = map(json.loads, file.read_text().splitlines())
    read = [Trial(**{**row, "survivors": {int(r): e for r, e in row["survivors"].items()}}) for row in rows]
    last = {(each.backend, each.fault, each.way, each.started): each for each in read}
    order = [(*cell, started) for started in ("launch", "torchrun") for cell in _cells(BACKENDS, started)]
    return [last[cell] for cell in order if cell in last]


def main(arguments: Sequence[str] | None = None, into: Path | None = None) -> int:
    """Run the trials and print the tables; the exit status is 1 where one falls short."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    parser.add_argument("--fault", action="append", choices=list(FAULTS))
    parser.add_argument("--way", action="append", choices=list(WAYS))
    parser.add_argument("--started", action="append", choices=["launch", "torchrun"])
    parser.add_argument(
        "--json", metavar="FILE", help="add each trial to this file as a line, and show all of it"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results: list[Trial] = []
    for started in options.started or ["launch", "torchrun"]:
        backends = [b for b in options.backend or BACKENDS if started == "launch" or b != "threads"]
        for cell in _cells(backends, started):
            if cell[1] in (options.fault or FAULTS) and cell[2] in (options.way or WAYS):
                results.append(trial(*cell, started))
                print(started, *cell, results[-1].short() or "as it should", file=sys.stderr, flush=True)
    if options.json:
        with open(options.json, "a") as file:
            file.writelines(json.dumps(dataclasses.asdict(each)) + "\n" for each in results)
        results = _kept(Path(options.json))
    show(page(results), into)
    return int(any(each.short() for each in results))


if __name__ == "__main__":
    sys.exit(main())
