"""One rank of a checked script: a process that runs it as torchrun would, and leaves its tape."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradmesh._util.call_sites import user_frame
from gradmesh.checker.recording.hooks import watched
from gradmesh.checker.recording.names import Modules
from gradmesh.checker.recording.recorder import Recorder
from gradmesh.checker.recording.tape import Tape
from gradmesh.checker.recording.verbs import Verbs
from gradmesh.runtime.state import ACTIVE_TRACERS, rank_state

__all__ = ["run_rank"]


def run_rank(
    rank: int, size: int, port: int, target: Any, folder: str, steps: int, record: bool = True
) -> None:
    """Run a script as one rank, in a process that is made for it and ends with it.

    Args:
        rank: as torchrun's environment says.
        size: how many there are.
        port: where they meet.
        target: what to run.
        folder: where the tape and what the script prints go.
        steps: of an optimizer, after which it ends.
        record: whether to record; else it only runs, as long.
    """
    path = Path(folder) / f"{rank}.out"
    stream = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for standard in (1, 2):
        os.dup2(stream, standard)
    faulthandler.enable(all_threads=False)  # says where, if a signal kills the rank
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
        TORCHELASTIC_RUN_ID="gradmesh-check",
    )
    torch.set_num_threads(1)
    tape, modules = Tape(rank, size), Modules()
    recorder = Recorder(tape, modules, Path(folder) / f"{rank}.calls")
    start = time.perf_counter()

    def enough() -> None:
        tape.ended, tape.seconds = "stopped", time.perf_counter() - start
        _leave(tape, recorder, Path(folder))

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_on_this_machine())
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(modules)
            stack.enter_context(watched(recorder, steps, enough))
            if record:
                stack.enter_context(recorder)
                rank_state().tracer = Verbs(recorder)
                ACTIVE_TRACERS[0] += 1
            kept = _run(target)  # noqa: F841  DDP may never end where its group is destroyed before it
    except SystemExit as error:
        if error.code not in (None, 0):
            _failed(tape, recorder, error, Path(folder))
    except BaseException as error:
        _failed(tape, recorder, error, Path(folder))
    if tape.ended != "stopped":
        tape.seconds = time.perf_counter() - start
        _leave(tape, recorder, Path(folder))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # groups whose other ranks are over may not end by themselves


def _leave(tape: Tape, recorder: Recorder, folder: Path) -> None:
    """Write the tape, whole or not at all."""
    recorder.settle()
    partial = folder / f"{tape.rank}.partial"
    with partial.open("wb") as file:
        pickle.dump(tape, file, pickle.HIGHEST_PROTOCOL)
    partial.rename(folder / f"{tape.rank}.tape")


def _run(target: Any) -> dict[str, Any]:
    """Run it, and return its globals."""
    sys.argv = [target.path_or_module, *target.args]
    if target.module:
        sys.path.insert(0, os.getcwd())
        return runpy.run_module(target.path_or_module, run_name="__main__", alter_sys=True)
    sys.path.insert(0, os.path.dirname(os.path.abspath(target.path_or_module)))
    return runpy.run_path(target.path_or_module, run_name="__main__")


def _failed(tape: Tape, recorder: Recorder, error: BaseException, folder: Path) -> None:
    traceback.print_exc()
    (folder / f"{tape.rank}.failed").touch()
    if tape.ended == "stopped":
        return  # all that was asked for is known
    tape.ended, tape.error = "raised", traceback.format_exception_only(error)[0].strip()
    tape.raised_at = recorder.number_of(user_frame(error.__traceback__))


@contextlib.contextmanager
def _on_this_machine() -> Any:
    """Gloo where a script asks for NCCL and there is no GPU."""
    original = dist.init_process_group

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not torch.cuda.is_available() and (backend is None or "nccl" in str(backend)):
            backend = "gloo"
            kwargs.pop("device_id", None)
        return original(backend, *args, **kwargs)

    dist.init_process_group = init
    try:
        yield
    finally:
        dist.init_process_group = original
