"""What ranks do under the deferred check, for test_deferred_check.py: right programs, wrong ones, and random ones."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.errors import CheckWarning
from gradmesh.transport import deferred_check
from gradmesh.transport.process_group import TorchGroup
from tests import simulated_device as sd
from tests.store_event import StoreEvent
from tools import mismatches

__all__ = [
    "FAULTS",
    "Outcome",
    "ends_with_the_group",
    "late_joiner",
    "missing_call",
    "outcome",
    "random_program",
    "refused_call",
    "returned_early",
    "right",
    "sizes_beside_a_call",
    "stalled_after_its_part",
    "stepped",
    "steps_elsewhere",
    "traffic",
    "without_the_hub",
]

Outcome = tuple[str, str, float, bool]
"""The class of the error, "" for none; its text; seconds; and whether an optimizer stepped after the mistake."""


def outcome(program: Callable[..., None], *args: Any) -> Outcome:
    """Run a program, which notes whether an optimizer stepped after its mistake, under the deferred check."""
    begin, stepped = time.monotonic(), [False]
    try:
        with gm.check("deferred"):
            program(stepped, *args)
    except (gm.GradmeshError, RuntimeError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin, stepped[0]
    return "", "", time.monotonic() - begin, stepped[0]


def _optimizer() -> torch.optim.Optimizer:
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1)


def stalled_after_its_part(done: list[bool]) -> None:
    """A rank stands still in a call that is compared at once, to which all have come; another one goes on."""
    group = dist.new_group([0, 1])
    with gm.check(1):
        gm.all_gather(torch.ones(1), group)
    gm.all_gather(torch.ones(1))
    begin = TorchGroup._all_to_all

    def slow(*call: Any) -> Mock:
        work = begin(*call)

        def wait() -> None:
            work.wait()
            time.sleep(2.5)

        return Mock(wait=wait)

    with gm.check(1), patch.object(TorchGroup, "_all_to_all", slow if gm.rank() else begin):
        gm.all_gather(torch.ones(1), group)
    gm.shift(torch.ones(1))
    done[0] = True


def stepped(done: list[bool], name: str, form: str, *, known: bool = False) -> None:
    """A mismatch of `tools.mismatches`, and an optimizer's step."""
    optimizer = _optimizer()
    optimizer.step()
    if known:
        for made in mismatches.MISMATCHES[name]:
            made()
    gm.all_gather(torch.zeros(1))
    optimizer.step()
    mismatches.provoked(name, form)
    optimizer.step()
    done[0] = True


def missing_call(done: list[bool], over: StoreEvent) -> None:
    """Rank 1 is busy instead of making a call, until that of rank 0 is over."""
    gm.all_reduce(torch.ones(4), dst=gm.R)
    if gm.rank() == 1:
        over.wait()
    else:
        try:
            gm.all_reduce(torch.ones(4), dst=gm.R)
        finally:
            over.set()
    _optimizer().step()
    done[0] = True


def first_call_late(done: list[bool], over: StoreEvent) -> None:
    """Rank 1 is busy before its first call, until that of rank 0 is over."""
    if gm.rank() == 1:
        over.wait()
    try:
        done[0] = bool(gm.all_reduce(torch.ones(4), dst=gm.R)[0])
    finally:
        over.set()


def returned_early(done: list[bool]) -> None:
    """Rank 1 makes a call less, and returns."""
    gm.all_reduce(torch.ones(4), dst=gm.R)
    if gm.rank() == 0:
        gm.all_reduce(torch.ones(4), dst=gm.R)
    done[0] = gm.rank() == 0


def refused_call(done: list[bool]) -> None:
    """Rank 1 passes an invalid argument."""
    gm.all_reduce(torch.ones(4), dst=gm.R)
    gm.all_gather(torch.ones(4), dim=3 if gm.rank() else 0)
    done[0] = True


def late_joiner(done: list[bool]) -> None:
    """The operand of rank 1 requires no gradient, so that it does not run the backward of the call."""
    optimizer = _optimizer()
    gm.all_reduce(torch.ones(4), dst=gm.R)
    optimizer.step()
    weight = torch.ones(4, requires_grad=True)
    y = gm.all_reduce(torch.ones(4, requires_grad=gm.rank() == 0), dst=gm.R)
    (y * weight).sum().backward()
    optimizer.step()
    done[0] = True


def steps_elsewhere(done: list[bool]) -> None:
    """Rank 0 steps between two backward calls, rank 1 after both; in the end rank 0 is busy before its step."""
    optimizer = _optimizer()
    weight = torch.ones(4, requires_grad=True)
    for number in range(2):
        results = [gm.all_reduce(weight, dst=gm.R) for _ in range(2)]
        results[0].sum().backward()
        if gm.rank() == 0:
            optimizer.step()
        results[1].sum().backward()
        if gm.rank() == 0:
            time.sleep(1.5 * number)
        else:
            optimizer.step()
    optimizer.step()
    gm.barrier()
    done[0] = True


def right(level: Any) -> list[list[float]]:
    """Values and gradients of a program with ordered, asynchronous, second-order and ragged calls."""
    rank, found = gm.rank(), []
    draws = torch.Generator().manual_seed(rank)
    weight = torch.randn(4, generator=draws, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with gm.check(level):
        for _ in range(3):
            with gm.ordered():
                y = gm.all_gather(weight**2)
                gm.all_reduce(weight * 2, dst=gm.R)  # its result is used on no rank
                gm.backward(((1 + rank) * y**2).sum() if rank == 0 else None)
            x = torch.randn(2 + rank, generator=draws, dtype=torch.float64).requires_grad_()
            sizes = [2 + each for each in range(gm.world_size())]
            z = gm.all_gather(x**3, sizes=sizes, async_op=True).wait()
            (force,) = torch.autograd.grad((z**2).sum() * (1 + rank), x, create_graph=True)
            (force**2).sum().backward()
            parts = gm.all_to_all(
                weight,
                split_sizes=(1, 3) if rank == 0 else (2, 2),
                concat_sizes=(1, 2) if rank == 0 else (3, 2),
            )
            parts.sum().backward()
            gm.barrier()
            optimizer.step()
            found += [weight.tolist(), y.tolist(), force.tolist(), x.grad.tolist()]  # type: ignore[union-attr]
        gm.reduce(weight.detach(), root=1)
    return found


def traffic(steps: int) -> tuple[int, int]:
    """The messages that this process sends in some steps, and how often the hub wakes in a second after them."""
    messages, turns = [0], [0]
    send, turn = deferred_check._Connection.send, deferred_check.Hub._turn

    def counted_send(self: Any, *args: Any) -> bool:
        messages[0] += 1
        return send(self, *args)

    def counted_turn(self: Any) -> None:
        turns[0] += 1
        turn(self)

    counting = patch.multiple(deferred_check._Connection, send=counted_send)
    with gm.check("deferred"), counting, patch.multiple(deferred_check.Hub, _turn=counted_turn):
        optimizer = _optimizer()
        for number in range(1 + steps):
            gm.all_reduce(torch.ones(4), dst=gm.R)
            optimizer.step()
            if number == 0:
                messages[0] = 0
        sent = messages[0]
        dist.barrier()
        deadline, turned = time.monotonic() + 10, -1
        while turned != turns[0] and time.monotonic() < deadline:  # for the answers of the last step
            turned = turns[0]
            time.sleep(0.5)
        turns[0] = 0
        time.sleep(1)
    return sent, turns[0]


def _own_threads() -> list[str]:
    return sorted(t.name for t in threading.enumerate() if t.name.startswith("gradmesh deferred"))


def _sockets() -> int:
    return sum(what.startswith("socket") for what in _descriptors())


def _descriptors() -> list[str]:
    """What the open descriptors are of; other threads open and close some meanwhile."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def ends_with_the_group(fork: bool) -> tuple[list[str], list[str], int, int]:
    """The threads during and after a world, and the sockets before and after it, in this process or a child."""
    before = _sockets()
    with gm.check("deferred"):
        gm.all_reduce(torch.ones(4), dst=gm.R)
    during, with_world = _own_threads(), _sockets()
    if fork:
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writer, bytes([_sockets()]))
            os._exit(0)
        os.waitpid(child, 0)
        return during, [], with_world, os.read(reader, 1)[0]
    dist.destroy_process_group()
    deadline = time.monotonic() + 10
    while (_own_threads() or _sockets() > before) and time.monotonic() < deadline:
        time.sleep(0.05)
    return during, _own_threads(), before, _sockets()


def without_the_hub() -> Outcome | None:
    """The rank whose process compares leaves; the two others make a mistake."""
    with gm.check("deferred"):
        for _ in range(2):
            gm.all_reduce(torch.ones(4), dst=gm.R)
            _optimizer().step()
    here: list[Any] = [None] * 3
    dist.all_gather_object(here, any(name.endswith("hub") for name in _own_threads()))
    (hub,) = (rank for rank, is_hub in enumerate(here) if is_hub)
    others = [rank for rank in range(3) if rank != hub]
    group = dist.new_group(others)
    if gm.rank() == hub:
        dist.destroy_process_group()
        return None

    def program(done: list[bool]) -> None:
        for _ in range(3):
            gm.all_reduce(torch.ones(4), group, dst=gm.R)
            _optimizer().step()
        time.sleep(1)
        gm.all_reduce(torch.ones(4), group, dst=gm.R if gm.rank() == others[0] else gm.I)
        _optimizer().step()
        done[0] = True

    return outcome(program)


def stranger(token: bool, *sent: str) -> tuple[list[bytes], list[str], list[float]]:
    """What the hub answers to connections that are not of a rank, what is warned about, and a call afterwards.

    Args:
        token: whether they send the token first.
        sent: what each sends.
    """
    import json

    def framed(text: str) -> bytes:
        return len(text).to_bytes(4, "big") + bytes(4) + text.encode()

    answers = []
    with gm.check("deferred"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gm.all_reduce(torch.ones(4), dst=gm.R)
        _optimizer().step()
        store = dist.distributed_c10d._get_default_store()
        address = json.loads(store.get("gradmesh/deferred check/0"))
        for text in sent if gm.rank() == 1 else ():
            with socket.create_connection((address["hosts"][0], address["port"])) as connection:
                connection.settimeout(20)
                hello = {"token": address["token"], "rank": 2, "gone": {}}
                connection.sendall(framed(json.dumps(hello)) if token else b"")
                connection.sendall(text.encode() if text.startswith("GET") else framed(text))
                answers.append(connection.recv(1 << 12))
        for _ in range(2):
            y = gm.all_reduce(torch.ones(4), dst=gm.R)
            _optimizer().step()
    return answers, [str(each.message) for each in caught], y.tolist()


# -- random programs

FAULTS = ("none", "drop", "add", "swap", "detach", "unused", "return")


def random_program(seed: int, fault: str, size: int) -> tuple[Outcome, list[list[float]]]:
    """Three training steps of random calls; one rank makes a mistake in the second or third step.

    In the second step the shapes of all calls differ, so that the mistake is met by calls that are new; in the third
    one all calls are alike, since Gloo ends the process for known calls of other sizes that meet.

    Returns:
        The outcome, and this rank's gradients.
    """
    draw = random.Random(seed)
    guilty, wrong_step = draw.randrange(size), draw.choice((1, 2))
    calls = draw.randint(2, 4)
    verbs = [draw.choice(("sum", "gather", "mean", "scan")) for _ in range(calls)]
    place = draw.randrange(calls - (fault == "swap"))
    used = [draw.random() < 0.7 for _ in range(calls)]
    used[place] = True
    gradients: list[list[float]] = []

    def make(verb: str, x: Tensor) -> Tensor:
        if verb == "gather":
            return gm.all_gather(x)
        if verb == "scan":
            return gm.scan(x)
        return gm.all_reduce(x, dst=gm.R, op="mean" if verb == "mean" else "sum")

    def program(done: list[bool]) -> None:
        optimizer = _optimizer()
        for step in range(3):
            faulty = fault if gm.rank() == guilty and step == wrong_step else "none"
            alike = step == 2
            generator = torch.Generator().manual_seed(97 * seed + gm.rank())
            xs = [
                torch.randn(4 if alike else 2 + 3 * at + 20 * step, generator=generator, dtype=torch.float64)
                for at in range(calls)
            ]
            order = list(range(calls))
            if faulty == "drop":
                order.remove(place)
            if faulty == "add":
                order.insert(place, place)
            if faulty == "swap":
                order[place], order[place + 1] = order[place + 1], order[place]
            loss = torch.zeros((), dtype=torch.float64, requires_grad=True)
            for at in order:
                x = xs[at].requires_grad_(not (faulty == "detach" and at == place))
                y = make("sum" if alike else verbs[at], x)
                if used[at] and not (faulty == "unused" and at == place):
                    loss = loss + ((1 + gm.rank()) * y**2).sum()
                if faulty == "return" and at == place:
                    return
            loss.backward()
            optimizer.step()
            done[0] = done[0] or step >= wrong_step
            gradients.extend([] if x.grad is None else x.grad.tolist() for x in xs)
        gm.barrier()
        optimizer.step()

    if fault == "level 1":
        program([False])
        return ("", "", 0.0, True), gradients
    return outcome(program), gradients


def sizes_of_a_late_rank() -> list[str]:
    """Rank 0 waits for the sizes of rank 2, which has made no call yet, after a call that rank 1 makes as late."""
    with gm.use_mesh(sd.grid(rows=2, cols=2)), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        x = torch.ones(2)
        if gm.rank("rows") == 1 or gm.rank("cols") == 1:
            time.sleep(1)
        if gm.rank("rows") == 0:
            gm.all_reduce(x, "cols", dst=gm.R)
        if gm.rank("cols") == 0:
            gm.all_gather(x, "rows", sizes="auto")
    return [str(each.message) for each in heard if issubclass(each.category, CheckWarning)]


def mismatch_beside_a_wait(over: list[StoreEvent]) -> tuple[str, bool]:
    """Rank 2 waits for rank 0, which is busy, and then makes another call than rank 3, for whose sizes rank 1 waits."""
    started, rank = time.monotonic(), gm.rank()
    with gm.use_mesh(sd.grid(rows=2, cols=2)):
        x = torch.ones(2)
        gm.all_reduce(x, "rows", dst=gm.R)
        row, col = gm.rank("rows"), gm.rank("cols")
        if row == col == 0:
            for other in over[1:]:  # so that its end does not end their waits
                other.wait()
            return "", True
        try:
            if row == 0:
                gm.all_gather(x, "rows", sizes="auto")
            y = gm.all_reduce(x, "rows", dst=gm.R) if col == 0 else x
            gm.all_reduce(x, "cols", dst=gm.R) if col == 0 else gm.scan(x, "cols")
            with contextlib.suppress(RuntimeError):  # of the kernel whose collective was aborted
                y.cpu()
            gm.all_reduce(x, "cols", dst=gm.R)
        except gm.GradmeshError as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - started < 10
        finally:
            over[rank].set()
    return "", False


def sizes_beside_a_call() -> str:
    """Rank 0 waits for a call on the device, and rank 1 for sizes, which are exchanged on the CPU before its call."""
    x = torch.ones(2 + gm.rank())
    gm.all_reduce(x[:1], dst=gm.R)
    try:
        if gm.rank() == 0:
            with contextlib.suppress(RuntimeError):  # of the kernel whose collective was aborted
                gm.all_reduce(x, dst=gm.R).cpu()
            gm.all_reduce(x, dst=gm.R)
        else:
            gm.all_gather(x, sizes="auto")
    except gm.GradmeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _both_send_first(x: Tensor) -> None:
    with gm.ordered():
        gm.send(x.sin(), to=1 - gm.rank())
        y = gm.recv(x, source=1 - gm.rank())
        gm.backward(y.sum() * (1 + gm.rank()))


def _both_receive_first(x: Tensor) -> None:
    y = gm.recv(x.detach(), source=1 - gm.rank())
    gm.send(y, to=1 - gm.rank())


def _other_shape(x: Tensor) -> None:
    if gm.rank() == 0:
        gm.send(x.detach()[:1], to=1)
    else:
        gm.recv(x.detach(), source=0).cpu()


def _refused_send(x: Tensor) -> None:
    if gm.rank() == 0:
        gm.send(x.detach(), to=1, comm_dtype=torch.int32)
    else:
        gm.recv(x.detach(), source=0).cpu()


def _two_in_other_order(x: Tensor) -> None:
    shapes = [(1,), (2,)]
    for n in shapes if gm.rank() == 0 else shapes[::-1]:
        if gm.rank() == 0:
            gm.send(x.detach().new_ones(n), to=1)
        else:
            gm.recv(x.detach().new_ones(n), source=0)


MESSAGES = {
    "both send first": _both_send_first,
    "both receive first": _both_receive_first,
    "another shape": _other_shape,
    "refused": _refused_send,
    "another order": _two_in_other_order,
}


def messages(name: str) -> str:
    """What a program of messages on the device raises on this rank."""
    x = torch.ones(2, requires_grad=True)
    try:
        with contextlib.suppress(RuntimeError):  # of a kernel whose group was aborted
            MESSAGES[name](x)
        torch.optim.SGD([x], lr=0.0).step()
        gm.barrier()
    except gm.GradmeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _connected(x: Tensor) -> Tensor:
    """The first message from rank 0 to rank 1, which waits for its receiver; those that follow do not."""
    return gm.send(x, to=1) if gm.rank() == 0 else gm.recv(x, source=0)


def first_message_and_a_call() -> str:
    """Rank 0 makes its first send before a call that rank 1 makes before it receives."""
    x = torch.ones(2)
    try:
        if gm.rank() == 0:
            gm.send(x, to=1)
        gm.all_reduce(x, dst=gm.R)
        if gm.rank() == 1:
            gm.recv(x, source=0)
    except gm.GradmeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def kept_message() -> list[float]:
    """Rank 0 steps, and makes another call, before rank 1 receives its message."""
    w = torch.ones(2, requires_grad=True)
    _connected(w.detach())
    w.grad = torch.ones(2)
    optimizer = torch.optim.SGD([w], lr=0.5)
    if gm.rank() == 0:
        gm.send(w.detach() * 3, to=1)
        optimizer.step()
    total = gm.all_reduce(w.detach(), dst=gm.R)
    if gm.rank() == 1:
        total = total + gm.recv(total, source=0)
        optimizer.step()
    return total.tolist()


def drawn_messages(seed: int, size: int) -> tuple[list[tuple[int, int, int]], int, int]:
    """Messages (source, receiver, elements), in an order in which each can wait; one of them, and an end of it."""
    draw = random.Random(seed)
    messages = [(*draw.sample(range(size), 2), draw.randint(1, 3)) for _ in range(8)]
    number = draw.randrange(len(messages))
    return messages, number, draw.choice(messages[number][:2])


def random_messages(seed: int, fault: str, size: int) -> tuple[str, list[float]]:
    """Random messages on the device, differentiated; one end of one of them is wrong.

    Returns:
        What this rank raised, and the gradient of what it sent.
    """
    messages, wrong, guilty = drawn_messages(seed, size)
    mine = [at for at, (source, to, _) in enumerate(messages) if gm.rank() in (source, to)]
    if gm.rank() == guilty and fault == "left out":
        mine.remove(wrong)
    if gm.rank() == guilty and fault == "another order":
        mine.remove(wrong)
        mine.append(wrong)
    x, loss = torch.ones(4, requires_grad=True), torch.zeros(())
    optimizer = torch.optim.SGD([x], lr=0.0)
    try:
        with contextlib.suppress(RuntimeError):  # of a kernel whose group was aborted
            with gm.ordered():
                for at in mine:
                    source, to, n = messages[at]
                    n += fault == "another shape" and at == wrong and gm.rank() == guilty
                    if source == gm.rank():
                        gm.send(x[:n] * (1 + at), to=to)
                    else:
                        loss = loss + gm.recv(x[:n].detach(), source=source).sum() * (1 + gm.rank())
                gm.backward(loss if loss.requires_grad else None)
            optimizer.step()
        gm.barrier()
        return "", [] if x.grad is None else x.grad.tolist()
    except gm.GradmeshError as error:
        return type(error).__name__, []


def _sent_last(x: Tensor) -> Tensor:
    """Rank 0 returns as soon as it has sent."""
    gm.all_reduce(x, dst=gm.R)
    time.sleep(1 if gm.rank() == 0 else 0)
    return gm.send(x, to=1) if gm.rank() == 0 else gm.recv(x, source=0)


def _beside_a_barrier(x: Tensor) -> Tensor:
    """Rank 1 receives before the barrier, and rank 0 sends after it."""
    _connected(x)
    y = gm.recv(x, source=0) if gm.rank() == 1 else x
    gm.barrier()
    return gm.send(x, to=1) if gm.rank() == 0 else y


def _step_before_the_others_first_call(x: Tensor) -> Tensor:
    w = torch.ones(1, requires_grad=True)
    w.grad = torch.ones(1)
    if gm.rank() == 0:
        sent = gm.send(x, to=1)
        torch.optim.SGD([w]).step()
        return sent
    time.sleep(1)
    return gm.recv(x, source=0)


RIGHT_MESSAGES = {
    "sent last": _sent_last,
    "beside a barrier": _beside_a_barrier,
    "step before the other's first call": _step_before_the_others_first_call,
}


def right_messages(name: str) -> list[float]:
    """What rank 1 receives."""
    return RIGHT_MESSAGES[name](torch.full((2,), 3.0)).cpu().tolist()


def no_message() -> None:
    """A function without a call."""


def unreceived() -> str:
    """Rank 0 sends to a rank that returns."""
    x = torch.ones(2)
    try:
        if gm.rank() == 0:
            gm.send(x, to=1)
            with contextlib.suppress(RuntimeError):  # of the kernel whose group was aborted
                torch.accelerator.synchronize()
            gm.send(x, to=1)
    except gm.GradmeshError as error:
        return f"{type(error).__name__}: {error}"
    return ""
