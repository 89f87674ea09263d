"""What one call of a verb enters: Python calls and files, forward and backward, on threads; and modules at the import.

    python -m tools.calls
    python -m tools.calls all_reduce clip_loss --list

Counted with `sys.setprofile` on rank 0 after warm-up: calls of functions of gradmesh alone, not those of torch and of
the standard library, which differ between versions. The other rank arrives when rank 0 waits, so that rank 0 never does
the work of both. Backward is that of the sum of the results, with the result's own nodes alone.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import click
import torch
from torch import Tensor

import gradmesh as gm
from gradmesh.backends.threads.rendezvous import Group, Waitable

WARM_UP = 3
_ROOT = str(Path(gm.__file__).parent)
_MEET, _SLEEP = Group.meet.__code__, Waitable.sleep.__code__
_waits = threading.Semaphore(0)
"""How often rank 0 has waited for the other rank, and that one has not arrived since."""


class Count(NamedTuple):
    """The Python functions of gradmesh that were entered, as file and name, in order."""

    forward: tuple[tuple[str, str], ...]
    backward: tuple[tuple[str, str], ...]

    @property
    def row(self) -> tuple[int, int, int, int]:
        """Calls and files, forward and backward."""
        both = self.forward, self.backward
        return tuple(n for each in both for n in (len(each), len({file for file, _ in each})))  # type: ignore[return-value]


Call = Callable[[Tensor], Tensor]


def _embeddings(x: Tensor) -> tuple[Tensor, Tensor]:
    left = x.reshape(2, 2)
    return left, torch.ones(2, 2)


def _heads(x: Tensor) -> Tensor:
    return x.view(1, 1, 4, 1)


CALLS: dict[str, Call] = {
    "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_reduce mean": lambda x: gm.all_reduce(x, op="mean", dst=gm.R),
    "all_reduce async": lambda x: gm.all_reduce(x, dst=gm.R, async_op=True).wait(),
    "all_gather": gm.all_gather,
    "all_to_all": gm.all_to_all,
    "broadcast": gm.broadcast,
    "gather": gm.gather,
    "halo_exchange": lambda x: gm.halo_exchange(x, dim=0, halo=1),
    "permute": lambda x: gm.permute(x, pairs=[(0, 1), (1, 0)]),
    "reduce": gm.reduce,
    "reduce_scatter": gm.reduce_scatter,
    "replicate": gm.replicate,
    "scan": gm.scan,
    "scatter": gm.scatter,
    "shift": gm.shift,
    "clip_loss": lambda x: gm.nn.clip_loss(*_embeddings(x), 2.0),
    "ring_attention": lambda x: gm.nn.ring_attention(_heads(x), _heads(x), _heads(x)),
}
"""What is counted: a call on this rank's tensor of 4 elements."""


def counted(name: str, *, requires_grad: bool = True) -> Count:
    """What a call enters, on rank 0 of 2 threads."""
    found: Count = gm.launch(_on_rank, 2, backend="threads", args=(name, requires_grad))[0]
    return found


def _on_rank(name: str, requires_grad: bool) -> Count:
    x = torch.arange(4.0, requires_grad=requires_grad)
    for _ in range(WARM_UP):
        y = CALLS[name](x)
        if requires_grad:
            y.sum().backward()
    y, forward = _entered(lambda: CALLS[name](x))
    backward: tuple[tuple[str, str], ...] = ()
    if requires_grad:
        loss = y.sum()
        _, backward = _entered(loss.backward)
    return Count(forward, backward)


def _entered(call: Callable[[], object]) -> tuple[Tensor, tuple[tuple[str, str], ...]]:
    entered: list[tuple[str, str]] = []
    while gm.rank() == 0 and _waits.acquire(blocking=False):
        pass
    gm.barrier()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_ROOT):
            entered.append((code.co_filename.removeprefix(_ROOT + "/"), code.co_qualname))
            if code is _SLEEP:
                _waits.release()

    def follow(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is _MEET:
            _waits.acquire(timeout=5)

    sys.setprofile(follow if gm.rank() else note)
    try:
        y: Tensor = call()  # type: ignore[assignment]  # of a verb
    finally:
        sys.setprofile(None)
    return y, tuple(entered)


def modules_at_import() -> int:
    """How many modules of gradmesh `import gradmesh` loads, in a fresh interpreter."""
    program = "import sys, gradmesh; print(sum(name.split('.')[0] == 'gradmesh' for name in sys.modules))"
    return int(
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    )


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.argument("names", nargs=-1, type=click.Choice(list(CALLS)))
@click.option("--list", "listed", is_flag=True, help="Print every call.")
def main(names: tuple[str, ...], listed: bool) -> None:
    """Print the table."""
    print(f"{'':<20}{'no gradient':>14}{'forward':>14}{'backward':>14}    Python calls / files")
    for name in names or CALLS:
        plain, both = counted(name, requires_grad=False), counted(name)
        rows = plain.row[:2], both.row[:2], both.row[2:]
        print(f"{name:<20}" + "".join(f"{f'{calls} / {files}':>14}" for calls, files in rows))
        if listed:
            for title, calls in (("forward", both.forward), ("backward", both.backward)):
                print(f"  {title}")
                print("\n".join(f"    {file:<40}{function}" for file, function in calls))
    print(f"{'import gradmesh':<20}{modules_at_import():>6} modules")


if __name__ == "__main__":
    main()
