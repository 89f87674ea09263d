"""Transports: a custom one carries every op, and the transport is chosen in one place."""

from __future__ import annotations

import queue
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

import gradmesh as gm
from gradmesh.backends.threads.group import ThreadsGroup
from gradmesh.ops.all_reduce import AllReduce
from gradmesh.ops.base import LinearOp
from gradmesh.ops.mean import Mean
from gradmesh.ops.registry import REGISTRY
from gradmesh.transport import TRANSPORTS, Transport
from gradmesh.transport.call_checks import Calls, calls_of
from tests import contract
from tests.conftest import Worlds

Ranks = Callable[[int], Callable[..., list[Any]]]
PACKAGE = Path(gm.__file__).parent


# ---- a custom transport: letters in boxes ---------------------------------------------------------------------------

Box = queue.SimpleQueue[Any]
BOXES: dict[object, Box] = defaultdict(queue.SimpleQueue)
LOCK = threading.Lock()


class Letters(Transport):
    """Ranks that are threads put letters into boxes, one for each pair of ranks; a letter is lists of numbers."""

    def box(self, kind: str, source: int, target: int) -> Box:
        with LOCK:
            return BOXES[kind, tuple(self.axis.global_ranks), source, target]

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        receive: Sequence[int],
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,
    ) -> Tensor:
        me = self.axis.rank
        for rank, part in enumerate(flat.split(list(send))):
            self.box("parts", me, rank).put(bytes(part.contiguous().view(torch.uint8).tolist()))
        out = self.room(flat, [sum(receive)] if shape is None else shape)
        for rank, part in enumerate(out.view(-1).split(list(receive))):
            letter = self.box("parts", rank, me).get(timeout=60)
            if letter:
                part.copy_(torch.frombuffer(bytearray(letter), dtype=flat.dtype))
        return out

    def post(self, x: Tensor, peer: int, greeting: str) -> None:
        self.box("message", self.axis.rank, peer).put((greeting, x.clone()))

    def fetch(self, out: Tensor, peer: int, greeting: str) -> str | None:
        said, x = self.box("message", peer, self.axis.rank).get(timeout=60)
        if said == greeting:
            out.copy_(x)
        return None if said == greeting else str(said)


# ---- and what it carries ---------------------------------------------------------------------------------------------


@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSPORTS, ThreadsGroup, Letters)


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("row", range(len(REGISTRY)), ids=contract.row_ids())
@pytest.mark.parametrize(
    ("size", "place", "laws"),
    [
        (3, "world", contract.LAWS),
        pytest.param(4, "subgroup", [contract.keeps_the_law], marks=pytest.mark.slow),
    ],
    ids=["world", "subgroup"],
)
def test_a_carrier_with_one_motion_carries_every_op_and_every_law(
    size: int, place: str, laws: Sequence[contract.Check], row: int, threads: Ranks
) -> None:
    def on_each_rank() -> int:
        axis = contract.axis_of(place)
        return sum(contract.on_examples_of(axis, law, [row]) for law in laws)

    assert max(threads(size)(on_each_rank)) >= len(laws)
    assert BOXES  # it was this transport that carried them, and nothing was left over
    assert all(box.empty() for box in BOXES.values())


@pytest.mark.usefixtures("letters")
def test_custom_transport_sends_messages_both_ways(threads: Ranks) -> None:
    def on_each_rank() -> float | None:
        x = torch.tensor(3.0, requires_grad=True)
        with gm.ordered():
            if gm.axis().rank == 0:
                gm.send(x**2, to=1)
                gm.backward(None)
            else:
                gm.backward(10 * gm.recv(torch.empty(()), source=0))
        return None if x.grad is None else x.grad.item()

    assert threads(2)(on_each_rank) == [60.0, None]


def test_transport_without_messages_raises(threads: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = type("Bare", (Letters,), {"post": Transport.post, "fetch": Transport.fetch})
    monkeypatch.setitem(TRANSPORTS, ThreadsGroup, bare)

    def on_each_rank() -> str:
        rank = gm.axis().rank
        with pytest.raises(gm.ArgumentError, match="does not support point-to-point messages") as caught:
            gm.send(torch.ones(2), to=1) if rank == 0 else gm.recv(torch.ones(2), source=0)
        return str(caught.value)

    first, second = threads(2)(on_each_rank)
    assert "gradmesh.send" in first
    assert "gradmesh.recv" in second


# ---- one place decides -----------------------------------------------------------------------------------------------


def mentions(text: str) -> list[str]:
    """The files of the package, outside of the packages that may, which contain a text."""
    packages = ("transport", "backends")
    files = [f for f in PACKAGE.rglob("*.py") if f.relative_to(PACKAGE).parts[0] not in packages]
    return sorted(str(f.relative_to(PACKAGE)) for f in files if text in f.read_text())


@pytest.mark.parametrize("text", ["ShmGroup", "ThreadsGroup", "OwnGroup", "isinstance(axis.group"])
def test_nothing_above_the_transports_asks_which_transport_it_has(text: str) -> None:
    assert mentions(text) == []


@pytest.mark.parametrize("room", ["ops", "autograd", "verbs"])
def test_nothing_above_the_transports_imports_a_backend(room: str) -> None:
    whole = PACKAGE / room
    files = whole.rglob("*.py") if whole.is_dir() else [whole.with_suffix(".py")]
    assert [file.name for file in files if "gradmesh.backends" in file.read_text()] == []


def test_calls_on_a_group_of_another_package_are_counted_whatever_attributes_it_has() -> None:
    class Foreign(dist.ProcessGroup):
        calls = ("made elsewhere",)

    group = Foreign(0, 1)  # type: ignore[call-arg]
    assert isinstance(calls_of(group), Calls)
    assert calls_of(group) is calls_of(group)
    assert group.calls == ("made elsewhere",)


def test_torch_is_asked_in_one_place_whether_it_compiles() -> None:
    asking = sorted(f.relative_to(PACKAGE) for f in PACKAGE.rglob("*.py") if "is_compiling" in f.read_text())
    assert asking == [Path("_torch/compilers.py")]


def test_a_sum_of_operands_in_different_memory_formats_is_right(processes: Ranks, threads: Ranks) -> None:
    """Gloo adds tensors in the order of their memory; through the verbs that cannot be seen."""

    def on_each_rank() -> bool:
        rank = gm.axis().rank
        x = torch.arange(6.0).view(2, 3) * (1 + rank)
        mine = x if rank == 0 else x.T.contiguous().T
        image = torch.arange(48.0).view(2, 2, 3, 4)
        last = image if rank == 0 else image.contiguous(memory_format=torch.channels_last)
        return all(
            [
                torch.equal(gm.all_reduce(mine, dst=gm.R), 3 * torch.arange(6.0).view(2, 3)),
                torch.equal(gm.reduce_scatter(mine), (3 * torch.arange(6.0).view(2, 3))[rank : rank + 1]),
                torch.equal(gm.all_reduce(last, dst=gm.R), 2 * image),
                torch.equal(gm.all_reduce(last, op="max", dst=gm.R), image),
                torch.equal(gm.scan(last), (1 + rank) * image),
            ]
        )

    assert threads(2)(on_each_rank) == [True, True]
    assert processes(2)(on_each_rank) == [True, True]


# ---- what is copied by address --------------------------------------------------------------------------------------

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


def random_operand(draw: random.Random, rows: int) -> Tensor:
    """Small numbers, whose sums are exact: any dtype and strides, with pending conjugation, or without memory."""
    width = draw.choice([1, 2, 3, 64, 500])
    dtype = draw.choice(DTYPES)
    numbers = torch.randint(
        0, 2, (rows, width), generator=torch.Generator().manual_seed(draw.getrandbits(30))
    )
    x = numbers.to(dtype)
    layout = draw.choice(
        ["dense", "transposed", "expanded", "every second", "conjugate", "zeros without memory"]
    )
    if layout == "transposed":
        x = x.t().contiguous().t()
    elif layout == "expanded":
        x = x[:, :1].expand(rows, width)
    elif layout == "every second":
        x = x.repeat_interleave(2, dim=1)[:, ::2]
    elif layout == "conjugate" and dtype.is_complex:
        x = (x * (1 + 1j)).conj()
    elif layout == "zeros without memory":
        x = torch._efficientzerotensor((rows, width), dtype=dtype)
    return x


def random_calls(seed: int, calls: int) -> list[tuple[str, Tensor]]:
    """The results of random calls; every rank draws the same calls, and sizes of its own."""
    draw, ranks, rank = random.Random(seed), gm.world_size(), gm.rank()
    found = []
    for number in range(calls):
        verb = draw.choice(
            ["all_gather", "all_to_all", "all_reduce", "reduce_scatter", "broadcast", "reduce"]
        )
        sizes = [draw.choice([0, 0, 1, 2, 5, 9]) for _ in range(ranks)]
        parts = [[draw.choice([0, 0, 1, 3, 8]) for _ in range(ranks)] for _ in range(ranks)]
        root, state = draw.randrange(ranks), draw.getrandbits(30)
        rows = {"all_gather": sizes[rank], "all_to_all": sum(parts[rank]), "reduce_scatter": sum(sizes)}
        x = random_operand(random.Random(state), rows.get(verb, max(sizes)))
        if x.dtype is torch.bool and "reduce" in verb:
            x = x.byte()
        if verb == "all_gather":
            y = gm.all_gather(x, sizes=sizes)
        elif verb == "all_to_all":
            y = gm.all_to_all(x, split_sizes=parts[rank], concat_sizes=[row[rank] for row in parts])
        elif verb == "reduce_scatter":
            y = gm.reduce_scatter(x, sizes=sizes)
        elif verb == "broadcast":
            y = gm.broadcast(x, root=root)
        elif verb == "reduce":
            y = gm.reduce(x, root=root)
        else:
            y = gm.all_reduce(x, dst=gm.R)
        found.append((f"{number}: {verb} of {x.dtype}{list(x.shape)}", y.resolve_conj().clone()))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("level", [0, 1, "deferred"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_random_calls_on_gloo_are_those_of_thread_ranks(
    worlds: Worlds, threads: Ranks, ranks: int, level: Any
) -> None:
    def run(checked: Any) -> list[tuple[str, Tensor]]:
        with gm.check(checked):
            return random_calls(7 * ranks, 150)

    expected = threads(ranks)(run, 1)
    for of_gloo, of_threads in zip(worlds(ranks, "gloo", 240).run(run, level), expected, strict=True):
        for (name, y), (same, z) in zip(of_gloo, of_threads, strict=True):
            assert name == same
            assert y.dtype == z.dtype, name
            assert torch.equal(y, z), name


class Wrapper(Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def held(x: Any) -> Any:
            return x.held if isinstance(x, Wrapper) else x

        made = func(*tree_map(held, args), **tree_map(held, kwargs or {}))
        return Wrapper(made) if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default) else made


@pytest.mark.processes
def test_a_tensor_without_memory_of_its_own_is_sent(worlds: Worlds) -> None:
    def run() -> list[list[float]]:
        x = Wrapper(torch.tensor([1.0, 2.0]) + gm.rank())
        with torch.no_grad():
            return [y.tolist() for y in (gm.all_gather(x), gm.all_reduce(x, dst=gm.R), gm.all_to_all(x))]

    for rank, (gathered, total, exchanged) in enumerate(worlds(2, "gloo", 240).run(run)):
        assert gathered == [1.0, 2.0, 2.0, 3.0]
        assert total == [3.0, 5.0]
        assert exchanged == [1.0 + rank, 2.0 + rank]


def wrong_for_itself(level: Any) -> str:
    """Rank 0 has 4,000 rows for itself, and expects one; one row goes to the other rank, each way."""
    with gm.check(level):
        sizes = [4000, 1] if gm.rank() == 0 else [1, 1]
        try:
            gm.all_to_all(torch.ones(sum(sizes)), split_sizes=sizes, concat_sizes=[1, 1])
        except (RuntimeError, gm.GradmeshError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()  # until when the other rank has what this one sent
    return ""


@pytest.mark.processes
@pytest.mark.parametrize("level", [0, 1])
def test_a_rank_that_expects_another_part_of_itself_than_it_has_raises(level: int) -> None:
    first, second = gm.launch(wrong_for_itself, 2, backend="gloo", args=(level,))
    if level:
        assert first.startswith("MismatchError: ")
        assert second.startswith("MismatchError: ")
    else:
        assert first == "RuntimeError: this rank has 16000 bytes for itself, where it expects 4"
        assert second == ""


@dataclass(frozen=True)
class TooLong(LinearOp):
    """An op that sends each rank more rows than its operand has, or expects more than its result has."""

    more: tuple[int, int] = (1, 0)
    verb = "too_long"
    src, dst = gm.V, gm.V

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        send, receive = ([len(x) // self.axis.size + more] * self.axis.size for more in self.more)
        return wire.exchange(x, send, receive, x.shape)

    def out_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    @property
    def adjoint(self) -> LinearOp:
        return self


@pytest.mark.processes
@pytest.mark.parametrize("more", [(1, 0), (0, 1)])
def test_an_op_whose_counts_do_not_fit_its_tensors_raises_on_every_rank(more: tuple[int, int]) -> None:
    def run() -> str:
        try:
            gm.apply(TooLong(gm.axis(), more=more), torch.ones(4))
        except (RuntimeError, gm.GradmeshError) as error:
            return str(error)
        return ""

    for said in gm.launch(run, 2, backend="gloo"):
        assert "bytes of a tensor of shape [" in said


@dataclass(frozen=True)
class Halves(TooLong):
    """An exchange whose counts are floats, by mistake."""

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        counts: Any = [len(x) / self.axis.size] * self.axis.size
        return wire.exchange(x, counts, counts, x.shape)


@dataclass(frozen=True, init=False)
class WholeMean(Mean):
    """A mean that accepts integers."""

    def accepts(self, dtype: torch.dtype) -> None:
        pass

    def transfer(self, x: Tensor, wire: Transport) -> Tensor:
        return self.op.transfer(x, wire) // self.axis.size


@pytest.mark.processes
def test_an_op_of_a_program_does_not_change_what_is_known_of_those_of_the_library() -> None:
    def run() -> tuple[list[float], list[int]]:
        x = torch.arange(12.0) + 100 * gm.rank()
        with gm.check(0), pytest.raises(TypeError, match="float"):
            gm.apply(Halves(gm.axis()), x)
        exchanged = gm.all_to_all(x).tolist()
        mean = gm.apply(WholeMean(AllReduce(gm.axis())), torch.tensor([5]))
        with pytest.raises(gm.DTypeError, match="no mean"):
            gm.all_reduce(torch.tensor([5]), op="mean", dst=gm.R)
        return exchanged, mean.tolist()

    assert gm.launch(run, 2, backend="gloo") == [
        ([*range(6), *range(100, 106)], [5]),
        ([*range(6, 12), *range(106, 112)], [5]),
    ]
