"""Running programs on ranks, and judging what came."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh import _torch
from gradmesh.runtime.state import rank_state
from gradmesh.transport.deferred_check import Checker, connections, shut_down
from tools.attack.calls import HELPERS, Verb
from tools.attack.dense import Expected, expected
from tools.attack.meanings import Invalid
from tools.attack.programs import HEADER, Program, source

DEVICE = "simulated"
"""The backend that is the simulated device of the tests."""

GPU = "cuda"
"""The backend that is NVIDIA GPUs over NCCL."""

PATIENCE = 20.0
"""Seconds that a program may take; one that takes longer is said to hang."""

_GRACE = 5.0
"""Seconds that the kernels of a device get to end after an error."""

ALLOWED = {"float32": 2e-3, "float64": 1e-9, "complex128": 1e-9}
"""How far a value may be from the dense one, relative to the largest entry, or to 1."""


@dataclass(frozen=True)
class Verdict:
    """What became of a program."""

    # "right"; "refused" on every rank; "refused after a return", where some ranks were through and the others
    # raised; "refused in one group" of a mesh, and by no rank of another one; else a finding: "wrong",
    # "hang", "foreign error", "error on some ranks only"
    kind: str
    what: str = ""  # the refusal's first line, or what was wrong
    detail: str = ""  # more about a finding


@dataclass(frozen=True)
class Failure:
    """What a rank raised."""

    kind: str
    own: bool
    text: str


Outcome = dict[str, Tensor | None] | Failure


@lru_cache(maxsize=64)
def _code(text: str) -> Any:
    return compile(text, "<program>", "exec")


_made = threading.local()


def _lay_out() -> None:
    """Make the mesh of four ranks the current one; its groups are made once."""
    world, mesh = getattr(_made, "mesh", (None, None))
    state = rank_state()
    if mesh is None or world is not dist.group.WORLD:
        if state.mesh is not None and state.mesh.device_type == DEVICE:
            from tests.simulated_device import grid

            mesh = grid(rows=2, cols=2)
        else:
            mesh = gm.mesh(rows=2, cols=2)
        _made.mesh = world, mesh = dist.group.WORLD, mesh
    state.mesh, state.mesh_world = mesh, world


def plain(x: Tensor) -> Tensor:
    """The numbers of a tensor; torch has zeros without memory, which forward mode makes."""
    return torch.zeros(x.shape, dtype=x.dtype, device="cpu") if x._is_zerotensor() else x.detach().cpu()


def on_rank(text: str) -> Outcome:
    """Run a program on this rank; what it raises is an outcome too."""
    names: dict[str, Any] = {}
    exec(_code(HEADER + "".join(HELPERS.values())), names)
    names["lay_out"] = _lay_out
    exec(_code(text), names)
    state = rank_state()
    try:
        out = names["on_each_rank"]()
        found = {name: None if x is None else plain(x) for name, x in out.items()}
        if state.deferred_check is not None:
            state.deferred_check.flush()
        return found
    except Exception as error:
        if state.deferred_check is not None and type(error) is RuntimeError:
            error = state.deferred_check.verdict(error) or error  # of a kernel whose group was aborted
        state.started.abandon()  # the program ends here
        return _failure(error)
    finally:
        state.mesh = state.mesh_world = state.of_thread.chain = None


def on_device(text: str, delay: float) -> Outcome:
    """The same on the device of the tests, simulated with a delay before each kernel."""
    from tests import simulated_device

    found: list[Outcome] = []

    def run() -> None:
        # A second derivative outside of `ordered()` may be refused otherwise: docs/gpus.md says so.
        with torch.autograd.set_multithreading_enabled("create_graph=True" not in text):
            found.append(on_rank(text))
        if isinstance(found[0], Failure):
            ended = threading.Thread(target=_settled, daemon=True)
            ended.start()
            ended.join(_GRACE)
            time.sleep(1)  # in which the other ranks get what this one has sent
            # Kernels may wait for messages that no rank sends.
            if not simulated_device.ON_CUDA:
                shut_down([end[::-1] for end in connections()], _torch.default_store())
            elif ended.is_alive() and dist.group.WORLD is not None:
                _torch.abort_group(dist.group.WORLD)
            if isinstance(check := rank_state().deferred_check, Checker):
                check.close()  # its error is shown, not those of the calls before it that wait

    try:
        simulated_device.on_device(run, delay=delay)
    except RuntimeError as error:
        if found and isinstance(found[0], Failure):  # of kernels whose group was aborted
            return found[0]
        check = rank_state().deferred_check
        return _failure((check and check.verdict(error)) or error)
    return found[0]


def _settled() -> None:
    from tests import simulated_device

    with contextlib.suppress(RuntimeError):  # of a kernel
        if simulated_device.ON_CUDA:
            torch.cuda.synchronize()
        else:
            simulated_device.core().settle()


def _failure(error: Exception) -> Failure:
    return Failure(type(error).__name__, isinstance(error, gm.GradmeshError), str(error))


class Pools:
    """Ranks of one backend that live on from program to program, also after one that failed.

    Args:
        backend: as for `gradmesh.launch`; `DEVICE`: the simulated device of the tests; `GPU`: NVIDIA GPUs.
        patience: seconds that a program may take.
        delay: of the device: seconds before each kernel.
    """

    def __init__(self, backend: str, patience: float = PATIENCE, delay: float = 0.0) -> None:
        self.backend = backend
        self._on_device = backend in (DEVICE, GPU)
        if backend == GPU:
            os.environ["GRADMESH_TEST_DEVICE"] = GPU
        if self._on_device:  # a rank that waits for its device may be busy, for all that the others know
            os.environ.setdefault("GRADMESH_HANG", "8")
        self._patience = patience
        self._delay = delay
        self._pools: dict[int, gm.Ranks] = {}

    def run(self, program: Program) -> list[Outcome]:
        """Run a program on its ranks."""
        pool = self._pools.get(program.ranks)
        if pool is None:
            backend: Any = self.backend
            if self._on_device:
                from tests.simulated_device import ON_CUDA, POOL, build

                if not ON_CUDA:
                    build.module()  # before a rank has to wait for it
                backend = POOL
            pool = self._pools[program.ranks] = gm.Ranks(
                program.ranks, backend, timeout=self._patience, prefix=False
            )
        if not self._on_device:
            return pool.run(on_rank, source(program))
        try:
            outcomes = pool.run(on_device, source(program), self._delay)
        except gm.RankError as error:
            found = error.__cause__
            if not isinstance(found, gm.MismatchError | gm.DeadlockError):
                raise
            self.end(program.ranks)  # at the end of the function, where the last calls are compared
            return [_failure(found)] * program.ranks
        if any(isinstance(one, Failure) for one in outcomes):
            self.end(program.ranks)  # a deferred error ends the use of the groups
        return outcomes

    def end(self, ranks: int) -> None:
        """End those that run programs of so many ranks."""
        pool = self._pools.pop(ranks, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        """End all ranks."""
        for ranks in tuple(self._pools):
            self.end(ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def compared(
    outcomes: Sequence[Outcome], dense: Expected, dtype: str, allowed: float | None = None
) -> Verdict:
    """Hold what ranks returned against the dense run; a gradient that is None is zero."""
    allowed = ALLOWED[dtype] if allowed is None else allowed
    for rank, (own, right) in enumerate(zip(outcomes, dense, strict=True)):
        if isinstance(own, Failure):
            continue
        for name, value in right.items():
            got = own.get(name)
            if value is None and got is None:
                continue
            want = torch.zeros_like(got) if value is None and got is not None else value
            got = torch.zeros_like(want) if got is None and want is not None else got
            assert got is not None
            assert want is not None
            want = plain(want)
            detail = f"rank {rank}: {name} is {got.tolist()}, dense {want.tolist()}"
            if got.shape != want.shape:
                return Verdict("wrong", f"the shape of {name}", detail)
            far = (got - want).abs().max().item() if want.numel() else 0.0
            scale = max(1.0, want.abs().max().item() if want.numel() else 0.0)
            if not far <= allowed * scale:
                return Verdict("wrong", _kind_of(name), detail)
    return Verdict("right")


def tolerance(program: Program) -> float:
    """How far a value of the program may be off; that of float32 where this is what travels."""
    rounded = any(
        key.endswith("_dtype") for one in program.flat if isinstance(one, Verb) for key, _ in one.params
    )
    return ALLOWED["float32" if rounded else program.dtype]


_OVER = ("AbortedError", "DeadlockError")
"""Errors behind which a group is of no more use, also where every rank has one."""

_TORCHS = "this checkpoint() is not necessary"
"""Torch's own refusal of a reentrant checkpoint of which no output requires a gradient."""


def _kind_of(name: str) -> str:
    words = name.split()
    return " ".join(words[:-1]) if len(words) > 1 else "a value"


def judged(program: Program, pools: Pools, dense: Expected | None = None) -> Verdict:
    """Run a program on ranks and judge it."""
    dense = expected(program) if dense is None else dense
    try:
        outcomes = pools.run(program)
    except gm.RankError as error:
        # The launcher saw that all who had not returned wait, and said who waits where.
        ended = "DeadlockError" in str(error)
        return Verdict("refused after a return" if ended else "hang", _first_line(str(error)), str(error))
    failures = {rank: out for rank, out in enumerate(outcomes) if isinstance(out, Failure)}
    left = any(isinstance(one, Verb) and one.later is not None for one in program.flat)
    if failures and (
        left or len(failures) < program.ranks or any(f.kind in _OVER for f in failures.values())
    ):
        pools.end(program.ranks)  # these are no longer at the same place
    if not failures:
        return compared(outcomes, dense, program.dtype, tolerance(program))
    if any(_TORCHS in failure.text for failure in failures.values()):
        raise Invalid(_TORCHS)
    detail = "\n".join(f"rank {rank}: {f.kind}: {f.text}" for rank, f in failures.items())
    for failure in failures.values():
        if not failure.own:
            return Verdict("foreign error", f"{failure.kind}: {_first_line(failure.text)}", detail)
    first = next(iter(failures.values()))
    line = f"{first.kind}: {_first_line(first.text)}"
    if len(failures) == program.ranks:
        return Verdict("refused", line, detail)
    # A rank that had nothing more to wait for has returned, or one of a group that nothing was wrong with; the launch
    # as a whole fails.
    gone = all(
        one.kind == "DeadlockError" or "no such call, because" in one.text for one in failures.values()
    )
    groups = {group for axis in program.axes for group in program.groups(axis) if set(group) <= set(failures)}
    if gone or set(failures) == {rank for group in groups for rank in group}:
        return Verdict("refused after a return" if gone else "refused in one group", line, detail)
    return Verdict("error on some ranks only", line, detail)


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0]
