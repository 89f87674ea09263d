"""Futures of calls on the shm backend: they complete by themselves, with their errors, without a wait in Python."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.backends.shm import engine
from tests.conftest import Worlds
from tests.store_event import StoreEvent

pytestmark = pytest.mark.processes

W = 3


class Run(Protocol):
    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]: ...


@pytest.fixture(scope="module")
def ranks(worlds: Worlds) -> Run:
    """`ranks(fn, *args)` runs fn on three ranks."""
    return worlds(W, "shm", 60).run


@contextlib.contextmanager
def group(seconds: float = 20.0) -> Iterator[Any]:
    """A new group of all ranks, which a test may break."""
    made = dist.new_group(backend="shm", timeout=datetime.timedelta(seconds=seconds))
    try:
        yield made
    finally:
        dist.destroy_process_group(made)


def future_of(work: Any) -> Any:
    assert work is not None
    return work.get_future()


def failure(future: Any) -> str:
    """The error that a future raises, in words."""
    try:
        future.wait()
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return ""


def summed(tensor: Tensor, made: Any) -> Any:
    return future_of(dist.all_reduce(tensor, group=made, async_op=True))


@pytest.mark.timed
@pytest.mark.parametrize("count", [3, 1 << 20])
def test_a_future_is_handed_out_at_once_and_completes_while_its_rank_waits_in_cpp(
    count: int, ranks: Run
) -> None:
    def work() -> tuple[float, bool, float, float]:
        rank = dist.get_rank()
        with group() as made:
            x = torch.full((count,), rank + 1.0)
            dist.barrier()
            begin = time.monotonic()
            if rank == 2:
                time.sleep(0.5)
            future = summed(x, made)
            handed, early = time.monotonic() - begin, future.done()
            return handed, early, future.wait()[0][-1].item(), time.monotonic() - begin

    got = ranks(work)
    for rank, (handed, early, value, _) in enumerate(got):
        assert value == 6
        assert handed < 0.3 or rank == 2
        assert not early or rank == 2
    assert all(seconds < 1.5 for *_, seconds in got)


def test_futures_of_several_groups_complete(ranks: Run) -> None:
    def work() -> list[float]:
        rank = dist.get_rank()
        with group() as first, group() as second:
            xs = [torch.full((300_000,), float(i)) for i in range(6)]
            time.sleep(0.05 * rank)
            futures = [summed(x, first if i % 2 else second) for i, x in enumerate(xs)]
            return [future.wait()[0][-1].item() for future in reversed(futures)]

    assert ranks(work) == [[15.0, 12.0, 9.0, 6.0, 3.0, 0.0]] * W


def test_callbacks_see_the_result(ranks: Run) -> None:
    def work() -> tuple[float, float]:
        with group() as made:
            time.sleep(0.05 * dist.get_rank())
            future = summed(torch.ones(3), made)
            seen: list[float] = []
            done = threading.Event()

            def note(ended: Any) -> None:
                seen.append(ended.value()[0][0].item())
                done.set()

            future.add_done_callback(note)
            ten: Any = future.then(lambda ended: ended.value()[0] * 10)
            value = ten.wait()[0].item()
            assert done.wait(5)
            return value, seen[0]

    assert ranks(work) == [(30.0, 3.0)] * W


def test_a_callback_may_wait_for_further_calls(ranks: Run) -> None:
    """As the hooks of PowerSGD do, one inside another."""

    def work() -> float:
        with group() as made:
            time.sleep(0.05 * dist.get_rank())

            def again(ended: Any) -> Tensor:
                x = ended.value()[0] * 1
                future = summed(x, made)
                total: Any = future.then(lambda inner: summed(inner.value()[0] + 1, made).wait()[0])
                return total.wait()

            result: Any = summed(torch.ones(3), made).then(again)
            return result.wait()[0].item()

    assert ranks(work) == [30.0] * W


def test_a_message_has_a_future(ranks: Run) -> None:
    def work() -> float:
        rank = dist.get_rank()
        with group() as made:
            out, given = torch.zeros(400_000, 2).t(), torch.full((2, 400_000), rank + 1.0)
            came = future_of(dist.irecv(out, (rank - 1) % W, group=made))
            time.sleep(0.1 * rank)
            sent = future_of(dist.isend(given, (rank + 1) % W, group=made))
            came.wait()
            sent.wait()
            dist.barrier(group=made)
            return out.sum().item() / out.numel()

    assert ranks(work) == [3, 1, 2]


def test_mismatched_calls_fail_the_future_and_the_group_continues(ranks: Run) -> None:
    def work() -> tuple[str, str, float]:
        rank = dist.get_rank()
        with group() as made:
            time.sleep(0.05 * rank)
            waited = failure(summed(torch.ones(3 + (rank == 1)), made))
            future = summed(torch.ones(3 + (rank == 1)), made)
            chained: Any = future.then(lambda ended: ended.value())
            return waited, failure(chained), summed(torch.ones(1), made).wait()[0].item()

    for waited, chained, after in ranks(work):
        assert "MismatchError" in waited
        assert "float32[4]" in waited
        assert chained
        assert after == 3


def test_a_call_that_failed_already_has_a_future_that_fails(ranks: Run) -> None:
    def work() -> str:
        with group() as made:
            started = dist.all_reduce(torch.ones(3 + (dist.get_rank() == 1)), group=made, async_op=True)
            assert started is not None
            with pytest.raises(gm.errors.MismatchError):
                started.wait()
            return failure(future_of(started))

    assert all("MismatchError" in text for text in ranks(work))


@pytest.mark.timed
def test_a_future_ends_with_the_timeout_of_the_group_and_names_the_late_rank(ranks: Run) -> None:
    def work() -> tuple[str, float]:
        with group(0.6) as made:
            dist.barrier()
            begin = time.monotonic()
            if dist.get_rank() == 2:
                time.sleep(1.5)
                return "", 0.0
            text = failure(summed(torch.ones(3), made))
            return text, time.monotonic() - begin

    for text, seconds in ranks(work)[:2]:
        assert "DeadlockError" in text or "AbortedError" in text
        assert "rank" in text
        assert seconds < 1.4


def test_a_future_of_a_group_that_is_left_fails(ranks: Run) -> None:
    def work() -> str:
        rank = dist.get_rank()
        made = dist.new_group([0, 1], backend="shm", timeout=datetime.timedelta(seconds=20))
        if rank == 2:
            return ""
        if rank == 1:
            started.wait()
            dist.destroy_process_group(made)
            return ""
        future = summed(torch.ones(3), made)
        started.set()
        text = failure(future)
        dist.destroy_process_group(made)
        return text

    started = StoreEvent()
    text = ranks(work)[0]
    assert "AbortedError" in text
    assert "has left the group" in text


@pytest.mark.timed
def test_ddp_continues_backward_while_a_bucket_is_summed(ranks: Run) -> None:
    def work() -> tuple[float, float]:
        rank = dist.get_rank()
        first = torch.nn.Linear(64, 64)
        model = torch.nn.Sequential(first, *[torch.nn.Linear(64, 64) for _ in range(5)])
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
        reached = []
        first.weight.register_hook(lambda _: reached.append(time.monotonic()))
        for _ in range(2):  # the buckets are put into the order of the gradients after the first step
            loss = ddp(torch.full((4, 64), rank + 1.0)).sum()
            dist.barrier()
            begin = time.monotonic()
            if rank == 2:
                time.sleep(0.6)
            loss.backward()
        return reached[-1] - begin, time.monotonic() - begin

    for reached, seconds in ranks(work)[:2]:
        assert reached < 0.4
        assert seconds > 0.5


@pytest.mark.parametrize("bucket", [0.001, 25.0])
def test_ddp_averages_the_gradients_of_ranks_that_differ(bucket: float, ranks: Run) -> None:
    def work() -> bool:
        rank = dist.get_rank()
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
        twin = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
        twin.load_state_dict(model.state_dict())
        ddp = DistributedDataParallel(model, bucket_cap_mb=bucket)
        right = []
        for step in range(5):
            batches = [
                torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(W)
            ]
            model.zero_grad()
            twin.zero_grad()
            time.sleep(0.01 * ((rank + step) % W))
            (ddp(batches[rank]) ** 2 * (rank + 1)).sum().backward()
            sum((twin(batch) ** 2 * (r + 1)).sum() / W for r, batch in enumerate(batches)).backward()
            right += [
                torch.allclose(ours.grad, other.grad, rtol=1e-4, atol=1e-5)  # type: ignore[arg-type]
                for ours, other in zip(model.parameters(), twin.parameters(), strict=True)
            ]
        return all(right) and len(right) == 20

    assert ranks(work) == [True] * W


def test_a_python_hook_of_ddp_is_called_with_the_sum(ranks: Run) -> None:
    # DDP wants annotations of its own or none.
    hook = lambda made, bucket: summed(bucket.buffer(), made).then(lambda ended: ended.value()[0] * 2)

    def work() -> list[float]:
        model = torch.nn.Linear(3, 1, bias=False)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(dist.group.WORLD, hook)
        ddp(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad.flatten().tolist()

    assert ranks(work) == [[12.0] * 3] * W


@pytest.mark.timed
def test_background_thread_sleeps_without_async_calls(ranks: Run) -> None:
    def switches() -> int:
        path = f"/proc/self/task/{engine._helper.thread.native_id}/status"
        with open(path) as file:
            # It goes to sleep as often as it wakes; the other switches are those of a busy machine.
            return sum(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))

    def work() -> int:
        with group() as made:
            rank, last = dist.get_rank(), torch.zeros(1)
            came = future_of(dist.irecv(last, (rank - 1) % W, group=made))
            dist.barrier()  # so that it is pending on every rank, and there is such a thread
            dist.send(torch.ones(1), (rank + 1) % W, group=made)
            came.wait()
            time.sleep(0.2)
            before = switches()
            for _ in range(20):
                x = torch.ones(3)
                dist.all_reduce(x, group=made)
                time.sleep(0.02)
            return switches() - before

    assert all(woken <= 4 for woken in ranks(work))


def late_futures(count: int) -> list[str]:
    """Futures that are not done when the wait for their call has returned, or when it is said to be over."""
    wrong = []
    for number in range(count):
        x = torch.full((3,), float(number))
        pending = gm.all_reduce(x, dst=gm.R, async_op=True)
        ours = pending.future()
        with gm.coalesce():
            parts = [gm.all_gather(x, async_op=True), gm.all_gather(2 * x, async_op=True)]
        of_parts = [part.future() for part in parts]
        structure = gm.all_gather({"a": x, "b": x.to(torch.int64)}, async_op=True)
        of_structure = structure.future()
        work: Any = dist.all_reduce(x.clone(), async_op=True)
        futures: list[tuple[Any, Any]] = [
            (ours, pending),
            *zip(of_parts, parts, strict=True),
            (of_structure, structure),
        ]
        for future, call in futures:
            if number % 2:
                while not call.done():
                    time.sleep(0)
            else:
                call.wait()
            if not future.done():
                wrong.append(f"{number}: {call!r}")
            call.wait()
            future.value()
        its = work.get_future()
        if number % 2:
            while not work.is_completed():
                time.sleep(0)
        else:
            work.wait()
        if not its.done():
            wrong.append(f"{number}: a work of torch.distributed")
        work.wait()
        its.value()
    return wrong


@pytest.mark.parametrize("backend", ["shm", "gloo", "threads"])
def test_a_future_is_done_when_the_wait_for_its_call_has_returned(backend: str, worlds: Worlds) -> None:
    assert worlds(2, backend, 60).run(late_futures, 60) == [[], []]


def failed_futures() -> list[bool]:
    """Whether the futures of calls that fail are done when `wait` raises."""
    done = []
    for _ in range(20):
        pending = gm.all_reduce(torch.ones(2 + gm.rank()), dst=gm.R, async_op=True)
        future = pending.future()
        with contextlib.suppress(gm.MismatchError):
            pending.wait()
        done.append(future.done() and "MismatchError" in failure(future))
    return done


def test_a_future_of_a_call_that_failed_is_done_when_wait_raises(worlds: Worlds) -> None:
    assert worlds(2, "shm", 60).run(failed_futures) == [[True] * 20] * 2


def waits_in_callbacks() -> list[float]:
    """A callback may wait for its own call, and ask it for another future."""
    found = []
    for _ in range(20):
        pending = gm.all_reduce(torch.ones(3), dst=gm.R, async_op=True)
        then: Any = pending.future().then(
            lambda _, pending=pending: pending.wait()[0] + pending.future().value()[0]
        )
        found.append(then.wait().item())
        pending.wait()
    return found


@pytest.mark.parametrize("backend", ["shm", "threads"])
def test_callback_can_wait_for_the_call_it_belongs_to(backend: str, worlds: Worlds) -> None:
    assert worlds(2, backend, 60).run(waits_in_callbacks) == [[4.0] * 20] * 2


def waits_on_both_threads() -> list[float]:
    """The program waits for a call while a callback of its future does, also for a structure and in a block."""
    found: list[float] = []
    x = torch.ones(3)
    for _ in range(20):
        with gm.coalesce():
            member = gm.all_reduce(x, dst=gm.R, async_op=True)
        structure = gm.all_reduce({"a": x, "b": x.double()}, dst=gm.R, async_op=True)
        for pending in (gm.all_reduce(x, dst=gm.R, async_op=True), member, structure):

            def then(_: Any, pending: Any = pending) -> None:
                y = pending.wait()
                found.append(float(sum(each.sum() for each in (y.values() if isinstance(y, dict) else [y]))))

            done: Any = pending.future().then(then)
            pending.wait()
            done.wait()
    return found


@pytest.mark.parametrize("backend", ["gloo", "shm", "threads"])
def test_a_callback_and_the_program_may_wait_for_one_call(backend: str, worlds: Worlds) -> None:
    assert worlds(2, backend, 60).run(waits_on_both_threads) == [[6.0, 6.0, 12.0] * 20] * 2
