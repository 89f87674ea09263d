"""Running a script on local ranks under the recorder, and judging what was recorded."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gradmesh._torch.compilers import COMPILER
from gradmesh.checker.findings import Verdict
from gradmesh.checker.hooks import run_rank
from gradmesh.checker.judging.context import Context, listed
from gradmesh.checker.judging.judge import judged
from gradmesh.checker.judging.values import (
    averages_values,
    brought_together,
    buffers_together,
    copies_part,
    order_repeats,
    sends_nothing,
    shares_overlap,
)
from gradmesh.checker.report import counted
from gradmesh.checker.trace import Recording
from gradmesh.errors import ArgumentError
from gradmesh.launch.process_ranks import held_port

_AT_WORK = 0.2
"""Seconds of a processor: ranks that have used more of it are at work."""

_LOCAL_STEPS = 12
"""How many steps are looked at for the place where ranks that step by themselves bring their values together."""

_LATER = ("no_sync", "set_requires_gradient_sync", "register_comm_hook")
"""What scripts call whose later steps may not sum gradients as the first ones do."""

_EPOCH = 64
"""How many steps the second epoch of a sampler is waited for."""

_GRACE = 3.0
"""Seconds without any work, after which the ranks that are left by one that failed are ended."""

_PRELOADED = ["gradmesh.checker.hooks", COMPILER, "torch.nn.parallel"]
"""What ranks need in any case; optimizers load the compiler, which takes seconds on each."""


@dataclass(frozen=True)
class Target:
    """What to run."""

    path_or_module: str  # a file, or a module as `python -m` takes it
    module: bool = False  # whether it is a module
    args: tuple[str, ...] = ()  # what the script finds in sys.argv behind its name


def check_script(
    target: Target,
    *,
    ranks: int,
    steps: int = 2,
    timeout: float = 60.0,
    see: Callable[[Context], None] = lambda _: None,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Run a script on ranks, and judge what it did.

    It is ended after so many steps of an optimizer, and so are ranks of which no more is heard for `timeout` seconds.
    `see` is shown each step that is judged, and `progress` is called with what is done next.

    Raises:
        ArgumentError: the script does not exist.
    """
    if not target.module and not Path(target.path_or_module).is_file():
        raise ArgumentError.of(
            "the script does not exist",
            op="check",
            expected="a Python file, or -m and a module",
            got=target.path_or_module,
            remedy="pass the path of a Python file",
        )
    seconds = {"checked": 0.0, "judged": 0.0}

    def ran(number: int = ranks, steps: int = steps, **options: Any) -> Recording:
        progress(f"{number} ranks run {target.path_or_module}, {counted(steps, 'step')}")
        found = recorded(target, ranks=number, steps=steps, timeout=timeout, **options)
        seconds["checked"] += found.seconds
        return found

    def judge(found: Recording, see: Callable[[Context], None] = lambda _: None) -> Verdict:
        progress("comparing gradients")
        since = time.perf_counter()
        verdict = judged(found, see)
        seconds["judged"] += time.perf_counter() - since
        return verdict

    found = ran()
    verdict = judge(found, see)
    goes_on = all(tape is not None and tape.ended == "stopped" for tape in found.tapes)
    most = _GRACE + 3 * found.seconds
    if not verdict.findings and goes_on and _mentions(target, *_LATER):
        # The last micro-batches of an epoch may be fewer, and hooks compress after some steps.
        longer = ran(steps=_LOCAL_STEPS, most=most)
        last = judge(longer)
        if last.status == "complete" and not longer.stuck:
            found, verdict = longer, last
    own = [each.subject for each in verdict.findings if each.rule.id == "GM203"]
    seen = found.tapes
    apart = {each.rule.id for each in verdict.errors}
    if apart == {"GM101"} or (apart == {"GM201"} and not verdict.followed and verdict.steps):
        # Ranks may take steps of their own for a while, and bring their values together then.
        together, equal, more = brought_together(seen)
        if not together and (apart == {"GM201"} or sends_nothing(seen, at_last=True)):
            seen = ran(steps=_LOCAL_STEPS).tapes
            together, equal, more = brought_together(seen)
        if together:
            at = averages_values(seen) if sends_nothing(found.tapes) else None
            note = (
                f"each rank steps along its own gradient, and {'later' if at is None else f'at {at}'} the ranks bring "
                "together what they have: these are taken for local steps, whose gradients are not compared"
            ) + (
                ""
                if equal
                else "; parameters stay different on the ranks, and it is unknown whether that is intended"
            )
            findings = tuple(each for each in verdict.findings if each.rule.id not in apart)
            verdict = replace(verdict, findings=(*findings, *more), notes=(*verdict.notes, note))
    if own and (together_at := buffers_together(seen, own)) is None and seen is found.tapes:
        together_at = buffers_together(ran(steps=_LOCAL_STEPS).tapes, own)
    if own and together_at is not None:
        note = f"each rank has its own {listed(own)}, and the ranks bring it together at {together_at}"
        kept = tuple(each for each in verdict.findings if each.rule.id != "GM203")
        verdict = replace(verdict, findings=kept, notes=(*verdict.notes, note))
    tapes = [tape for tape in found.tapes if tape is not None]
    if not verdict.findings and goes_on and _mentions(target, "load_state_dict"):
        # A run may be resumed within the script, behind the steps that were checked.
        longer = ran(steps=_LOCAL_STEPS, record=False, most=most)
        verdict = replace(verdict, findings=tuple(copies_part(longer.tapes)))
    if len(tapes) == ranks and any(
        each.shuffle and not each.is_set for tape in tapes for each in tape.epochs
    ):
        # How the ranks' shares and their order go on is seen where the second epoch begins.
        longer = ran(steps=_EPOCH, record=False, most=most)
        tapes = [tape for tape in longer.tapes if tape is not None]
        more = [*shares_overlap(tapes), *order_repeats(tapes)] if len(tapes) == ranks else []
        known = {each.rule.id for each in verdict.findings}
        more = [each for each in more if each.rule.id not in known]
        verdict = replace(verdict, findings=(*verdict.findings, *more))
    if any(each.by_number for each in verdict.findings) and all(each.by_number for each in verdict.errors):
        verdict = _on_more_ranks(verdict, judge(ran(2 * ranks)))
    return replace(verdict, seconds=seconds)


def _mentions(target: Target, *names: str) -> bool:
    """Whether a script uses one of some functions, as far as its text says."""
    text = "" if target.module else Path(target.path_or_module).read_text(errors="replace")
    return any(name in text for name in names)


def _on_more_ranks(verdict: Verdict, other: Verdict) -> Verdict:
    """Drop divisions by a number that is that of the ranks by chance: it is not on twice as many."""
    more = other.ranks
    same = {(each.rule.id, str(each.at), each.subject) for each in other.findings}
    settled = other.status == "complete" and bool(other.followed)
    settled = settled and all(each.rule.id == "GM109" for each in other.errors)
    numbered = [each for each in verdict.findings if each.by_number]
    dropped = [each for each in numbered if (each.rule.id, str(each.at), each.subject) not in same]
    then = (
        f"on {more} ranks it does not: the number is taken for a constant of the program"
        if settled
        else f"whether the number is that of the ranks is unknown, as the program could not be checked on {more} ranks"
    )
    notes = [f"on {verdict.ranks} ranks {each.message}, at {each.at}; {then}" for each in dropped]
    kept = tuple(each for each in verdict.findings if each not in dropped)
    if settled and not kept and other.ok:
        places = ", ".join(sorted({str(each.at) for each in dropped}))
        why = f"on {verdict.ranks} a constant that divides the loss counts them"
        note = f"checked on {more} ranks, since {why}, at {places}"
        return replace(other, notes=(*other.notes, note))
    return replace(verdict, findings=kept, notes=(*verdict.notes, *notes))


def recorded(
    target: Target, *, ranks: int, steps: int, timeout: float, record: bool = True, most: float = math.inf
) -> Recording:
    """Run a script on ranks, for so many seconds at most, and collect their tapes."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_PRELOADED)
    temporary = tempfile.TemporaryDirectory(prefix="gradmesh-check-")
    with temporary as folder, held_port() as port, _ended(server) as start:
        since = time.perf_counter()
        started = [
            start(run_rank, (rank, ranks, port, target, folder, steps, record)) for rank in range(ranks)
        ]
        stuck, killed = _waited(started, Path(folder), timeout, since + most)
        seconds = time.perf_counter() - since
        tapes = [Path(folder) / f"{rank}.tape" for rank in range(ranks)]
        return Recording(
            [pickle.loads(path.read_bytes()) if path.exists() else None for path in tapes],
            [_lines(Path(folder) / f"{rank}.calls") for rank in range(ranks)],
            ["\n".join(_lines(Path(folder) / f"{rank}.out")) for rank in range(ranks)],
            stuck,
            killed,
            seconds,
        )


@contextlib.contextmanager
def _ended(server: Any) -> Iterator[Callable[[Any, tuple[Any, ...]], Any]]:
    """Start processes that end with this context, together with all that they start, however it ends.

    Each leads a process group. A guard, a process of its own, waits for the end of a pipe that this process alone
    holds open: where this process is killed, the guard ends the groups.
    """
    theirs, ours = server.Pipe(duplex=False)
    guard = server.Process(target=_guard, args=(theirs,), daemon=True)
    started: list[Any] = []

    def start(target: Any, args: tuple[Any, ...]) -> Any:
        process = server.Process(target=_leading, args=(target, args), daemon=False)
        process.start()
        started.append(process)
        ours.send(process.pid)
        return process

    try:
        guard.start()
        theirs.close()
        yield start
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            _end_group(process.pid)
        for process in started:
            process.join()
        with contextlib.suppress(OSError):
            ours.send(None)
        ours.close()
        guard.join()


def _leading(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run a function in a process that leads its process group."""
    os.setpgid(0, 0)
    # What the program starts by itself starts as in any process, not as this one was started.
    multiprocessing.set_start_method(None, force=True)
    target(*args)


def _guard(pipe: Any) -> None:
    """End the process groups whose leaders come through a pipe, where the pipe ends before a None comes."""
    os.setsid()  # a Ctrl-C at the terminal is not for it
    leaders: list[int] = []
    try:
        while (leader := pipe.recv()) is not None:
            leaders.append(leader)
    except EOFError:
        for leader in leaders:
            _end_group(leader)


def _end_group(leader: int | None) -> None:
    """Kill a process group; it may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if leader:
            os.killpg(leader, signal.SIGKILL)


def _waited(started: Sequence[Any], folder: Path, timeout: float, end: float) -> tuple[bool, dict[int, int]]:
    """Wait for the ranks, until they are over or nothing happens any more.

    Returns whether that was so, and the signals that killed ranks before, by rank.
    """
    stuck = _stand_still(started, folder, timeout, end)
    codes = [process.exitcode for process in started]
    return stuck, {rank: -code for rank, code in enumerate(codes) if code is not None and code < 0}


def _stand_still(started: Sequence[Any], folder: Path, timeout: float, end: float) -> bool:
    """Wait until all ranks are over, or have left their tapes, or nothing happens any more: whether it is that."""
    last, seen = time.monotonic(), (0, 0.0)
    failed = 0.0
    while any(process.is_alive() for process in started):
        if all((folder / f"{rank}.tape").exists() for rank in range(len(started))):
            return False
        time.sleep(0.02)
        now = time.monotonic()
        size = sum(_size(path) for path in folder.iterdir())
        used = sum(processor_time(process.pid) for process in started)
        if size != seen[0] or used - seen[1] > _AT_WORK:
            last, seen = now, (size, used)
        # Ranks that wait for one that has failed wait for ever, mostly; one that has ended may be waited for by none.
        one_failed = any(process.exitcode for process in started) or any(folder.glob("*.failed"))
        failed = failed or (now if one_failed else 0.0)
        if now - last > timeout or time.perf_counter() > end:
            return True
        if failed and now - max(failed, last) > min(timeout, _GRACE):
            return True
    return False


def processor_time(pid: int | None) -> float:
    """Seconds of a processor that a process has used, and waited for; 0.0 where that is unknown."""
    try:
        fields = Path(f"/proc/{pid}/schedstat").read_text().split()
        return (int(fields[0]) + int(fields[1])) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _size(path: Path) -> int:
    """The size of a file, which may be gone since it was listed."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []
