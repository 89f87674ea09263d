"""While a profiler is on, each collective is one named range, forward and backward; else it costs next to nothing."""

from __future__ import annotations

import contextlib
import functools
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import gradmesh as gm
from gradmesh import _torch, profiling

pytestmark = pytest.mark.filterwarnings("ignore:Profiler clears events at the end of each cycle:UserWarning")
Threads = Callable[[int], Callable[..., list[Any]]]


@contextlib.contextmanager
def ranges() -> Iterator[list[str]]:
    """The names of the library's ranges in a block, in the order in which they began."""
    names: list[str] = []
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        yield names
    events = sorted(profiled.events() or (), key=lambda event: event.time_range.start)
    names += [event.name for event in events if event.name.startswith("gradmesh::")]


def forward_and_backward() -> tuple[list[str], list[str]]:
    gm.mesh(tp=-1)
    rank, size = gm.axis("tp").rank, gm.axis("tp").size
    x = torch.randn(
        4 * (1 + rank), 8, dtype=torch.float64, requires_grad=True
    )  # 256 bytes, on the next rank 512
    with ranges() as forward:
        y = gm.all_gather(x, "tp", sizes=[4 * (1 + r) for r in range(size)])
        z = gm.all_reduce(y, "tp", op="mean", dst=gm.I)
        narrow = gm.replicate(z.float(), "tp", backward_dtype=torch.bfloat16)
        loss = (1 + rank) * (narrow**2).sum()
    with ranges() as backward:
        loss.backward()
    return forward, backward


def test_each_collective_is_one_range_with_its_verb_axis_and_bytes() -> None:
    """On the rank that profiles; a profiler of torch sees the thread that started it, so the world is of one rank."""
    gm.init()
    try:
        forward, backward = forward_and_backward()
    finally:
        torch.distributed.destroy_process_group()
    assert forward == [
        "gradmesh::all_gather axis=tp bytes=256",
        "gradmesh::all_reduce axis=tp bytes=256",
        "gradmesh::replicate axis=tp bytes=128",
    ]
    assert backward == [
        "gradmesh::all_reduce axis=tp bytes=64 backward",  # 32 numbers of bfloat16
        "gradmesh::replicate axis=tp bytes=256 backward",
        "gradmesh::reduce_scatter axis=tp bytes=256 backward",
    ]


def in_other_modes() -> dict[str, list[str]]:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

    def cube(x: Tensor) -> Tensor:
        return (gm.all_gather(x) ** 3).sum()

    def save_powers(_: object, op: object, *__: Any, **___: Any) -> CheckpointPolicy:
        keep = op is torch.ops.aten.pow.Tensor_Scalar
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def ordered() -> None:
        with gm.ordered():
            gm.backward(cube(x))

    selective = functools.partial(create_selective_checkpoint_contexts, save_powers)
    work: dict[str, Callable[[], object]] = {
        "vmap": lambda: torch.vmap(gm.all_gather)(x),
        "jvp": lambda: torch.func.jvp(cube, (x,), (x,)),
        "func.grad": lambda: torch.func.grad(cube)(x),
        "double backward": lambda: torch.autograd.grad(cube(x), x, create_graph=True)[0].sum().backward(),
        "max": lambda: gm.all_reduce(x, op="max", dst=gm.R),
        "ordered": ordered,
        "checkpoint": lambda: checkpoint(cube, x, use_reentrant=False).backward(),
        "selective": lambda: checkpoint(cube, x, use_reentrant=False, context_fn=selective).backward(),
    }
    found = {}
    for name, run in work.items():
        with ranges() as found[name]:
            run()
    # A profiler that is on for only one of the two passes.
    y = checkpoint(cube, x, use_reentrant=False, context_fn=selective)
    with ranges() as found["recomputed"]:
        y.backward()
    return found


def test_ranges_in_every_autodiff_mode_and_checkpoint() -> None:
    gm.init()
    try:
        found = in_other_modes()
    finally:
        torch.distributed.destroy_process_group()
    verbs = {name: " ".join(verb(range_) for range_ in names) for name, names in found.items()}
    assert verbs == {
        "vmap": "all_gather",
        "jvp": "all_gather all_gather",
        "func.grad": "all_gather reduce_scatter<",
        "double backward": "all_gather reduce_scatter< all_gather< reduce_scatter<",
        "max": verbs["max"],
        "ordered": "all_gather convert convert< reduce_scatter<",  # join relabels the loss
        "checkpoint": "all_gather all_gather< reduce_scatter<",
        "selective": "all_gather all_gather< reduce_scatter<",
        "recomputed": "all_gather< reduce_scatter<",
    }
    assert verbs["max"].split()[0] == "all_reduce"


def verb(name: str) -> str:
    """The verb of a range, with a mark if it is of a backward pass."""
    return name.split()[0].removeprefix("gradmesh::") + "<" * name.endswith(" backward")


# torch's own compiler does what torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_program_and_a_fake_tensor_have_no_ranges() -> None:
    gm.init()
    try:
        compiled = torch.compile(lambda x: gm.all_gather(x.sin()).sum(), fullgraph=True, backend="aot_eager")
        x = torch.ones(3, requires_grad=True)
        with ranges() as names:
            compiled(x).backward()
            gm.all_gather(torch.ones(3, device="meta"))
    finally:
        torch.distributed.destroy_process_group()
    assert x.grad is not None
    assert names == []


def test_without_a_profiler_no_range_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a flag is all that an unprofiled collective pays for it."""

    def unexpected(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(profiling, "collective", unexpected)
    gm.init()
    try:
        x = torch.ones(3, requires_grad=True)
        gm.all_gather(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert min(timeit.repeat(_torch.profiler_on, number=1000, repeat=5)) < 1e-3  # a microsecond each, at most


@pytest.mark.processes
def test_every_process_profiles_its_own_part(processes: Threads) -> None:
    for rank, (forward, backward) in enumerate(processes(2)(forward_and_backward)):
        mine, whole = 256 * (1 + rank), 256 * 3
        assert forward[0] == f"gradmesh::all_gather axis=tp bytes={mine}"
        assert backward[-1] == f"gradmesh::reduce_scatter axis=tp bytes={whole} backward"
