# mypy: disable-error-code="override"
# torch's stubs give every method a second, direct form, which torch.distributed does not call.
"""The process group that torch.distributed sees, of ranks that share memory.

A call is begun when it is made, and goes on while the rank waits for it or for anything else: the calls of a group in
order, those of different groups side by side. Only what the rank leaves unfinished is taken on by a thread
(`progress.in_background`).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradmesh import _torch
from gradmesh._torch import is_fake
from gradmesh.backends.process_group import REDUCTIONS, PythonGroup, Tensors, reduction
from gradmesh.backends.shm import collectives, progress
from gradmesh.backends.shm.p2p import DTYPES, Mail, Receive, Send, misfit
from gradmesh.backends.shm.phases import Call, Claim, Lockstep, RefusedError, Steps, refusal
from gradmesh.backends.shm.segment import BROKE, LEFT, Segment
from gradmesh.call_sites import Site, call_site, show_site, show_tensors
from gradmesh.errors import (
    AbortedError,
    ArgumentError,
    DTypeError,
    GradmeshError,
    NotInitializedError,
    ShapeError,
    message,
)

__all__ = ["ShmGroup"]

_DTYPE_NUMBER = {dtype: number for number, dtype in enumerate(DTYPES)}
_REDUCTION_NUMBER = {name: number for number, name in enumerate(REDUCTIONS)}
_KINDS = (
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "relay",
    "scatter",
    "sparse_all_reduce",
)
_KIND_NUMBER = {name: number for number, name in enumerate(_KINDS)}
_CLAIMS = 256
"""Claims that are kept for calls like the ones before."""
_DRAIN = 5.0
"""Seconds that a rank which leaves gives to calls that it began and never waited for."""

_groups: weakref.WeakSet[ShmGroup] = weakref.WeakSet()


class _Work(dist.Work):
    """A collective of one rank, begun."""

    def __init__(self, group: ShmGroup, steps: Steps, result: object, inference: bool, call: _Shown) -> None:
        super().__init__()
        self.group, self.steps, self.call = group, steps, call
        self.inference = inference
        self.done = False
        self.error: BaseException | None = None
        self._result = result

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if not self.done:
            self.group.finish(self, _seconds(timeout, self.group))
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        if not self.done:
            progress.progress()
        return self.done

    def is_success(self) -> bool:
        return self.done and self.error is None

    def exception(self) -> BaseException | None:
        return self.error

    def result(self) -> Any:
        self.wait()
        return self._result

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        # Whoever waits for a future waits in C++, where no call can go on; so it is complete when it is handed out.
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._result)
        return future

    def giving(self, result: object) -> _Work:
        """Have `result()` and the future hand this out."""
        self._result = result
        return self

    def late(self) -> list[int]:
        """The ranks of the group that have not come as far as this one."""
        return self.group.lockstep.late()


class _Message(_Work):
    """A message of one rank, begun."""

    def __init__(self, group: ShmGroup, under_way: Send | Receive, tensors: Tensors, call: _Shown) -> None:
        super().__init__(group, iter(()), tensors, inference=False, call=call)
        self.under_way = under_way
        self._after: Callable[[], object] | None = None

    def is_completed(self) -> bool:
        if not self.done and self.error is None:
            progress.progress()
            self.error = self.group.lost(self.under_way, self.call)
        if self.done:
            self._finish()
        return self.done or self.error is not None

    def is_success(self) -> bool:
        return self.done and not (isinstance(self.under_way, Receive) and self.under_way.misfit)

    def _finish(self) -> None:
        after, self._after = self._after, None
        if after is not None:
            _in_mode_of(self._result, after)

    @property
    def done(self) -> bool:
        return self.under_way.done

    @done.setter
    def done(self, value: bool) -> None:
        pass

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self.error is not None:
            raise self.error
        self.group.deliver(self.under_way, _seconds(timeout, self.group), self.call)
        if isinstance(self.under_way, Receive) and self.under_way.misfit:
            raise misfit(self.under_way, self.group.group_name)
        self._finish()
        return True

    def then(self, after: Callable[[], object]) -> _Message:
        """Do this too, when the message is here."""
        self._after = after
        return self

    def source_rank(self) -> int:
        return self.under_way.came_from if isinstance(self.under_way, Receive) else -1

    _source_rank = source_rank


class _All(_Work):
    """Several works as one, for `_end_coalescing`."""

    def __init__(self, group: ShmGroup, works: Sequence[_Work]) -> None:
        super().__init__(group, iter(()), [], inference=False, call=_Shown("several", []))
        self._works = works

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        self.done = True
        return True

    def is_completed(self) -> bool:
        self.done = all(work.is_completed() for work in self._works)
        return self.done

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((work.exception() for work in self._works if work.exception()), None)


def _seconds(timeout: datetime.timedelta | None, group: ShmGroup) -> float:
    seconds = timeout.total_seconds() if timeout else 0.0
    return seconds if seconds > 0 else group.timeout


class ShmGroup(PythonGroup):
    """A process group whose ranks are processes of one host."""

    backend = "shm"

    def __init__(self, segment: Segment, timeout: datetime.timedelta, name: str) -> None:
        super().__init__(name, segment.rank, segment.size, timeout)
        self.segment = segment
        self.spins = progress.spins(segment.size)
        self.lockstep = Lockstep(segment)
        self.mail = Mail(segment)
        self._queue: deque[_Work] = deque()
        self._lock = threading.RLock()
        self._coalesced: list[_Work] | None = None
        self._closed: Callable[[], GradmeshError] | None = None
        self._claim: Claim | None = None
        self._claims: dict[Hashable, Claim] = {}
        self._looked = 0.0
        _groups.add(self)

    def _get_sequence_number_for_group(self) -> int:
        return self.lockstep.phase

    def _shown(self) -> str:
        return f"group '{self._name}', rank {self.place} of {self.count}"

    def __repr__(self) -> str:
        return f"ShmGroup({self._shown()})"

    # -- what ranks say about a call

    def claim(self, key: Hashable, make: Callable[[], Claim]) -> None:
        """Have the next call compared by this too; ranks that claim something else make it an error on all of them.

        Args:
            key: what the claim depends on, by which it is kept.
            make: makes it.
        """
        found = self._claims.get(key)
        if found is None:
            if len(self._claims) >= _CLAIMS:
                self._claims.clear()
            found = self._claims[key] = make()
        self._claim = found

    def withdraw(self, said: str) -> None:
        """Make the call that was claimed an error on the other ranks, as this one fails before it can make it."""
        if self._claim is None or self._closed is not None:
            return
        self._claim = None
        call = Call(self.lockstep, secrets.randbits(64), Claim(0, lambda: said, refusal(self._name)))
        with contextlib.suppress(GradmeshError):
            self._post(_Shown(said, []), collectives.barrier(call), [], []).wait()

    def _call(self, name: str, shown: Callable[[], str], *facts: int) -> Call:
        head: int = hash((_KIND_NUMBER[name], *facts))
        claim, self._claim = self._claim, None
        if claim is None:
            return Call(self.lockstep, head, Claim(0, shown, refusal(self._name)))
        return Call(self.lockstep, hash((claim.digest, head)), claim)

    # -- beginning and finishing

    def _post(
        self,
        call: _Shown,
        steps: Steps,
        result: object,
        outputs: Iterable[Tensor],
        opts: Any = None,
    ) -> _Work:
        work = _Work(self, steps, result, any(map(Tensor.is_inference, outputs)), call)
        with self._lock:
            self._check()
            self._queue.append(work)
            if len(self._queue) == 1 or self.lockstep.arrived():
                self._go_on()
            if self._queue:
                progress.busy(self)
                call.begun()  # now that there is time
                if opts is not None and getattr(opts, "asyncOp", True):
                    progress.in_background()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _check(self) -> None:
        """Refuse calls on a group that is over."""
        if self._closed is not None:
            raise self._closed()

    def _go_on(self) -> None:
        """Take the calls in order as far as they go, after what the first waited for. The caller holds the lock."""
        queue = self._queue
        while queue:
            work = queue[0]
            if torch.is_inference_mode_enabled() == work.inference:
                over = self._step(work)
            else:  # whatever the caller's mode is, who may have begun another call
                with torch.inference_mode(work.inference):
                    over = self._step(work)
            if not over:
                return
            queue.popleft()

    def _step(self, work: _Work) -> bool:
        """Run a call until it has to wait; whether it is over."""
        try:
            over: bool = _torch.in_plain_mode(partial(next, work.steps, True))
        except RefusedError as refused:
            work.error = refused.args[0]
            over = True
        except BaseException as error:
            self._break(error)
            raise
        if over:
            work.done = True
        return over

    def finish(self, work: _Work, seconds: float) -> None:
        """Wait until a call is over."""
        lockstep = self.lockstep
        while not work.done:
            self._check()
            first = self._queue[0] if self._queue else work
            # Another thread of the rank may be the one that goes on.
            self._wait(
                lambda: work.done or lockstep.arrived(),
                lockstep.late_word,
                lockstep.late,
                seconds,
                first.call,
                True,
            )
            with self._lock:
                if self._queue and lockstep.arrived():
                    self._go_on()
                if not self._queue and not self.mail.busy:
                    progress.idle(self)

    def deliver(self, under_way: Send | Receive, seconds: float, call: Callable[[], str]) -> None:
        """Wait until a message has gone, or come."""
        mail = self.mail

        def ready() -> bool:
            with self._lock:
                self._progress_mail()
            return under_way.done

        if not under_way.done:
            self._check()
            word, needs = partial(mail.sleep_on, under_way), partial(mail.needs, under_way)
            self._wait(ready, word, needs, seconds, call, False)

    def _wait(
        self,
        ready: Callable[[], bool],
        word: Callable[[], tuple[int, int] | None],
        needs: Callable[[], Sequence[int]],
        seconds: float,
        call: Callable[[], str],
        in_call: bool,
    ) -> None:
        try:
            progress.until(ready, word, needs, self, seconds, call, in_call=in_call)
        except BaseException as error:
            self._break(error)
            raise

    def poll(self, in_call: bool = False, in_message: bool = False) -> bool:
        """Go on with what can go on; whether something is unfinished besides what the caller waits for.

        Args:
            in_call: the caller waits for the first call of this group, and goes on with it itself.
            in_message: the caller waits for a message of this group.
        """
        if not self._lock.acquire(blocking=False):
            return False  # another thread is at it
        try:
            if self._closed is not None:
                return False
            if self.mail.busy:
                self._progress_mail()
            if in_call:
                return self.mail.busy
            self._look()
            if self._queue and self.lockstep.arrived():
                self._go_on()
            if not self._queue and not self.mail.busy:
                progress.idle(self)
            return bool(self._queue) or self.mail.under_way > int(in_message)
        except Exception as error:
            self._break(error)  # whoever waits for this group hears of it, and not who waits for another one
            return False
        finally:
            self._lock.release()

    def _progress_mail(self) -> None:
        inference = self.mail.inference
        if torch.is_inference_mode_enabled() == inference:
            _torch.in_plain_mode(self.mail.progress)
        else:
            with torch.inference_mode(inference):
                _torch.in_plain_mode(self.mail.progress)

    def _look(self) -> None:
        """Now and then see whether the ranks that a begun call needs are there: who only polls never waits for them."""
        if self._queue and self._time_to_look():
            gone = self.segment.missing(self.lockstep.late(), self._queue[0].call)
            if gone is not None and not self.lockstep.arrived():
                self._break(gone)

    def lost(self, under_way: Send | Receive, call: Callable[[], str]) -> GradmeshError | None:
        """The error of a message that cannot come any more; None if it may, or is here."""
        if not under_way.done and self._closed is not None:
            return self._closed()
        if under_way.done or not self._time_to_look():
            return None
        gone = self.segment.missing(self.mail.needs(under_way), call)
        if gone is not None:
            with self._lock:  # it may have come before its sender went
                self._progress_mail()
        return None if under_way.done else gone

    def _time_to_look(self) -> bool:
        now = time.monotonic()
        if now - self._looked < progress.LOOK:
            return False
        self._looked = now
        return True

    # -- ending

    def _break(self, error: BaseException) -> None:
        """After an error in the middle of a call the ranks are out of step: nothing works any more."""
        text = f"{type(error).__name__}: {error}"
        self.segment.say(BROKE)
        over = message("the group is over: an earlier call failed", axis=self._shown(), got=text)
        self._end(partial(AbortedError, over), error if isinstance(error, GradmeshError) else None)

    def _over(self, why: str, remedy: str) -> Callable[[], GradmeshError]:
        over = message(f"the group is over: {why}", axis=self._shown(), remedy=remedy)
        return partial(NotInitializedError, over)

    def _end(self, closed: Callable[[], GradmeshError], error: GradmeshError | None = None) -> None:
        if self._closed is None:
            self._closed = closed
        for work in self._queue:
            work.error, work.done = error or closed(), True
        self._queue.clear()
        self._claims.clear()  # they hold the group itself
        self._claim = None
        progress.idle(self)

    def shutdown(self) -> None:
        with self._lock:
            if self._closed is None:
                try:
                    for work in list(self._queue):
                        self.finish(work, min(_DRAIN, self.timeout))
                except GradmeshError:
                    pass  # whoever is missing has gone, and nobody waits for the result
                self.segment.say(LEFT)
                self._end(self._over("this rank has left it", "make a new group"))
                self.segment.close()

    def abort(self) -> None:
        self.segment.say(BROKE)
        self.shutdown()

    def forget(self) -> None:
        """In a forked child: the group belongs to the parent."""
        self._lock = threading.RLock()
        self._closed = self._over(
            "it belongs to the process that this one was forked from",
            "start ranks with gradmesh.launch or torchrun, not by a fork",
        )
        self._queue.clear()

    # -- reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> _Work:
        op = reduction(opts, self.backend)
        shown = _Shown(f"all_reduce({op.lower()})", tensors)
        calls, after = [], _After()
        for tensor in tensors:
            if tensor.layout is torch.sparse_coo and tensor.is_cpu and op == "SUM":
                facts = len(tensors), _DTYPE_NUMBER[tensor.dtype], tensor.sparse_dim(), *tensor.shape
                three = [self._call("sparse_all_reduce", shown, *facts, part) for part in range(3)]
                calls.append(collectives.sparse_all_reduce(three, tensor))
                continue
            flat = after.flat(self, tensor, keep=True)
            _reducible(flat, op)
            call = self._call("all_reduce", shown, len(tensors), *_facts(flat), _REDUCTION_NUMBER[op])
            calls.append(collectives.all_reduce(call, flat, flat, op))
        return self._post(shown, after.steps(calls), tensors, tensors, opts)

    def all_reduce_into(self, output: Tensor, input: Tensor) -> _Work:  # noqa: A002
        """Sum over the ranks, not in place: torch.distributed has no such call, and a copy beforehand costs a third."""
        shown = _Shown("all_reduce(sum)", [input])
        after = _After()
        flat, out = _flat(self, input), after.flat(self, output)
        self._fits("output", output, input)
        _reducible(flat, "SUM")
        call = self._call("all_reduce", shown, 1, *_facts(flat), _REDUCTION_NUMBER["SUM"])
        return self._post(
            shown, after.steps([collectives.all_reduce(call, out, flat, "SUM")]), [output], [output]
        )

    def reduce(self, tensors: Tensors, opts: Any) -> _Work:
        op, root = reduction(opts, self.backend), opts.rootRank
        shown = _Shown(f"reduce({op.lower()}, root {root})", tensors)
        after = _After()
        flat = after.flat(self, tensors[0], keep=True)
        _reducible(flat, op)
        call = self._call("reduce", shown, *_facts(flat), _REDUCTION_NUMBER[op], root)
        return self._post(
            shown, after.steps([collectives.reduce(call, flat, flat, op, root)]), tensors, tensors, opts
        )

    def reduce_into(self, output: Tensor, input: Tensor, root: int) -> _Work:  # noqa: A002
        """Sum at the root, not in place; the output counts there alone."""
        shown = _Shown(f"reduce(sum, root {root})", [input])
        after = _After()
        flat, out = _flat(self, input), after.flat(self, output)
        if self.place == root:
            self._fits("output", output, input)
        _reducible(flat, "SUM")
        call = self._call("reduce", shown, *_facts(flat), _REDUCTION_NUMBER["SUM"], root)
        return self._post(
            shown, after.steps([collectives.reduce(call, out, flat, "SUM", root)]), [output], [output]
        )

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = None) -> _Work:
        op = reduction(opts, self.backend)
        shown = _Shown(f"reduce_scatter({op.lower()})", inputs[0], outputs)
        calls: list[Steps] = []
        after = _After()
        for output, given in zip(outputs, inputs, strict=True):
            out = after.flat(self, output)
            flats = [_flat(self, tensor) for tensor in self._one_per_rank("reduce_scatter", given)]
            _reducible(out, op)
            self._fits("output", output, given[self.place])
            sizes = [flat.numel() for flat in flats]
            facts = len(outputs), _DTYPE_NUMBER[out.dtype], _REDUCTION_NUMBER[op], *sizes
            if len(set(sizes)) == 1:
                call = self._call("reduce_scatter", shown, *facts)
                calls.append(collectives.reduce_scatter(call, out, flats, op))
                continue
            for target, flat in enumerate(flats):
                call = self._call("reduce_scatter", shown, *facts, target)
                calls.append(collectives.reduce(call, out, flat, op, target))
        return self._post(shown, after.steps(calls), outputs, outputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        op = reduction(opts, self.backend)
        shown = _Shown(f"reduce_scatter_single({op.lower()})", inputs, outputs)
        calls, after = [], _After()
        for output, given in zip(outputs, inputs, strict=True):
            out = after.flat(self, output)
            rows = self._rows(_flat(self, given), out, given, output).unbind(0)
            _reducible(out, op)
            facts = len(outputs), *_facts(out), _REDUCTION_NUMBER[op]
            call = self._call("reduce_scatter_single", shown, *facts)
            calls.append(collectives.reduce_scatter(call, out, rows, op))
        return self._post(shown, after.steps(calls), outputs, outputs, opts)

    # -- exchanges

    def broadcast(self, tensors: Tensors, opts: Any) -> _Work:
        root = opts.rootRank
        shown = _Shown(f"broadcast(root {root})", tensors)
        calls, after = [], _After()
        for tensor in tensors:
            flat = after.flat(self, tensor, keep=self.place == root)
            call = self._call("broadcast", shown, len(tensors), *_facts(flat), root)
            calls.append(collectives.broadcast(call, flat, root))
        return self._post(shown, after.steps(calls), tensors, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        shown = _Shown("all_gather", inputs, outputs[0])
        calls, after = [], _After()
        for taken, given in zip(outputs, inputs, strict=True):
            flat = _flat(self, given)
            outs = [after.flat(self, tensor) for tensor in self._one_per_rank("all_gather", taken)]
            self._fits("own place in the output list", taken[self.place], given)
            facts = len(inputs), _DTYPE_NUMBER[flat.dtype], *(out.numel() for out in outs)
            call = self._call("all_gather", shown, *facts)
            calls.append(collectives.all_gather_lists(call, outs, flat))
        return self._post(shown, after.steps(calls), outputs, [t for taken in outputs for t in taken], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        shown = _Shown("all_gather_single", inputs, outputs)
        calls, after = [], _After()
        for output, given in zip(outputs, inputs, strict=True):
            flat = _flat(self, given)
            rows = self._rows(after.flat(self, output), flat, output, given)
            call = self._call("all_gather_single", shown, len(inputs), *_facts(flat))
            calls.append(collectives.all_gather(call, rows, flat))
        return self._post(shown, after.steps(calls), outputs, outputs, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> _Work:
        root, given = opts.rootRank, inputs[0]
        after, flat = _After(), _flat(self, given)
        nothing = flat[:0]
        taken = [nothing] * self.count
        shown = _Shown(f"gather(root {root})", inputs, outputs[0] if outputs else [])
        if self.place == root:
            taken = [after.flat(self, tensor) for tensor in self._one_per_rank("gather", outputs[0])]
            self._fits("own place in the output list", outputs[0][root], given)
        gives = [flat if rank == root else nothing for rank in range(self.count)]
        call = self._call("gather", shown, _DTYPE_NUMBER[flat.dtype], root)
        steps = after.steps([collectives.exchange(call, taken, gives)])
        return self._post(shown, steps, outputs, outputs[0] if outputs else [], opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> _Work:
        root, output = opts.rootRank, outputs[0]
        after = _After()
        out = after.flat(self, output)
        nothing = out[:0]
        gives = [nothing] * self.count
        shown = _Shown(f"scatter(root {root})", inputs[0] if inputs else [], outputs)
        if self.place == root:
            gives = [_flat(self, tensor) for tensor in self._one_per_rank("scatter", inputs[0])]
            self._fits("output", output, inputs[0][root])
        taken = [out if rank == root else nothing for rank in range(self.count)]
        call = self._call("scatter", shown, _DTYPE_NUMBER[out.dtype], root)
        return self._post(
            shown, after.steps([collectives.exchange(call, taken, gives)]), outputs, outputs, opts
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        shown = _Shown("all_to_all", inputs, outputs)
        after = _After()
        gives = [_flat(self, tensor) for tensor in self._one_per_rank("all_to_all", inputs)]
        taken = [after.flat(self, tensor) for tensor in self._one_per_rank("all_to_all", outputs)]
        self._fits("own place in the output list", outputs[self.place], inputs[self.place])
        call = self._call("all_to_all", shown, _DTYPE_NUMBER[gives[0].dtype])
        return self._post(
            shown, after.steps([collectives.exchange(call, taken, gives)]), outputs, outputs, opts
        )

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> _Work:
        shown = _Shown("all_to_all_single", [input], [output])
        after = _After()
        given, out = _flat(self, input), after.flat(self, output)
        self._fits("output", output, input, sizes=False)
        number = _DTYPE_NUMBER[given.dtype]
        if not output_splits and not input_splits:
            self._split_sizes(input, input_splits)
            self._fits("output", output, input)
            call = self._call("all_to_all_single", shown, *_facts(given))
            pieces = given.view(self.count, -1 if given.numel() else 0)
            steps = collectives.all_to_all(call, out.view(pieces.shape).unbind(0), pieces.unbind(0))
        else:
            call = self._call("all_to_all_single", shown, number)
            gives = given.split(_elements(input, self._split_sizes(input, input_splits)))
            taken = out.split(_elements(output, self._split_sizes(output, output_splits)))
            self._fits("own part of the output", taken[self.place], gives[self.place])
            steps = collectives.exchange(call, taken, gives)
        return self._post(shown, after.steps([steps]), [output], [output], opts)

    def relay(self, output: Tensor, input: Tensor, source: int | None) -> _Work:  # noqa: A002
        """Hand on one tensor, or an empty one, and take that of one rank or of none; for all ranks at once."""
        shown = _Shown(f"relay(from {source})", [input], [output])
        after = _After()
        flat, out = _flat(self, input), after.flat(self, output)
        call = self._call("relay", shown, _DTYPE_NUMBER[flat.dtype])
        return self._post(
            shown, after.steps([collectives.relay(call, out, flat, source)]), [output], [output]
        )

    def barrier(self, opts: Any = None) -> _Work:
        shown = _Shown("barrier", [])
        return self._post(shown, collectives.barrier(self._call("barrier", shown)), [], [], opts)

    # -- point to point

    def send(self, tensors: Tensors, to: int, tag: int) -> _Work:
        shown = _Shown(f"send(to rank {to}, tag {tag})", tensors)
        send = Send(_flat(self, tensors[0]), to, tag)
        with self._lock:
            self._check()
            _torch.in_plain_mode(partial(self.mail.send, send))
        return self._message(_Message(self, send, tensors, shown))

    def recv(self, tensors: Tensors, source: int, tag: int) -> _Work:
        return self._receive(tensors, source, tag, f"recv(from rank {source}, tag {tag})")

    def recv_anysource(self, tensors: Tensors, tag: int) -> _Work:
        return self._receive(tensors, None, tag, f"recv(from anybody, tag {tag})")

    def _receive(self, tensors: Tensors, source: int | None, tag: int, call: str) -> _Work:
        after = _After()
        receive = Receive(after.flat(self, tensors[0]), source, tag)
        with self._lock:
            self._check()
            _torch.in_plain_mode(partial(self.mail.receive, receive))
        work = _Message(self, receive, tensors, _Shown(call, tensors))
        return self._message(work.then(partial(_torch.in_plain_mode, after.copy)))

    def _message(self, work: _Message) -> _Work:
        if not work.done:
            progress.busy(self)
            work.call.begun()
            progress.in_background()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # -- coalescing

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> _Work:  # noqa: ARG002
        works, self._coalesced = self._coalesced or [], None
        return _All(self, works)

    # -- checking tensors

    def _rows(self, large: Tensor, small: Tensor, whole: Tensor, piece: Tensor) -> Tensor:
        """The flat large tensor with one row for each rank, if that fits the flat small one."""
        if large.dtype != small.dtype:
            self._fits("output", whole, piece, sizes=False)
        if large.numel() != self.count * small.numel():
            raise self._not_one_piece_per_rank(whole, piece)
        return large.view(self.count, small.numel())

    def _fits(self, what: str, tensor: Tensor, other: Tensor, *, sizes: bool = True) -> None:
        if tensor.dtype != other.dtype or (sizes and tensor.numel() != other.numel()):
            raise ShapeError(
                message(
                    f"the {what} does not fit the input",
                    axis=self._shown(),
                    expected=show_tensors([other]),
                    got=show_tensors([tensor]),
                    remedy="give both the same dtype and number of elements",
                )
            )


class _After:
    """What is to be copied when a call is over: results whose memory is not in one piece."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def flat(self, group: ShmGroup, tensor: Tensor, *, keep: bool = False) -> Tensor:
        """A result as a flat tensor, with what is in it now if `keep`."""
        _on_cpu(group, tensor)
        # Without its history, and no view of another tensor, which autograd might not allow to write.
        plain = tensor.detach()
        if plain.is_contiguous() and not plain.is_neg() and not plain.is_conj():
            return plain if plain.dim() == 1 else plain.view(-1)
        if any(size > 1 and stride == 0 for size, stride in zip(plain.shape, plain.stride(), strict=True)):
            raise ShapeError(
                message(
                    "a result is expanded: several of its elements are one place in memory",
                    axis=group._shown(),
                    expected="a tensor with a place for each element",
                    got=f"shape {list(plain.shape)} with strides {list(plain.stride())}",
                    remedy="pass its .clone()",
                )
            )
        dense = _torch.in_plain_mode(partial(_dense_like, plain, keep))
        self._copies.append((plain, dense))
        return dense.view(-1)

    def steps(self, calls: Sequence[Steps]) -> Steps:
        """The calls one after another, and then the copies."""
        if len(calls) == 1 and not self._copies:
            return calls[0]
        return itertools.chain(itertools.chain.from_iterable(calls), self._finally())

    def _finally(self) -> Iterator[None]:
        self.copy()
        yield from ()

    def copy(self) -> None:
        """Copy now."""
        for tensor, dense in self._copies:
            tensor.copy_(dense)


def _flat(group: ShmGroup, tensor: Tensor) -> Tensor:
    """An operand as a flat tensor."""
    _on_cpu(group, tensor)
    plain = tensor.detach()
    if not plain.is_contiguous() or plain.is_neg() or plain.is_conj():
        plain = _torch.in_plain_mode(partial(_dense_like, plain, True))
    return plain if plain.dim() == 1 else plain.view(-1)


def _dense_like(tensor: Tensor, keep: bool) -> Tensor:
    """A tensor of the same shape in one piece, with the same values if they are to be kept."""
    dense = torch.empty(tensor.shape, dtype=tensor.dtype)
    return dense.copy_(tensor) if keep else dense


def _on_cpu(group: ShmGroup, tensor: Tensor) -> None:
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized or is_fake(tensor):
        raise ArgumentError(
            message(
                "the shm backend takes dense tensors on the CPU",
                axis=group._shown(),
                expected="a dense CPU tensor with values",
                got=f"a {type(tensor).__name__} on {tensor.device}, {tensor.layout}, {tensor.dtype}",
                remedy="for CUDA tensors make a second group: torch.distributed.new_group(backend='nccl')",
            )
        )


_reduced: set[tuple[torch.dtype, str]] = set()


def _reducible(flat: Tensor, op: str) -> None:
    """Refuse what torch's own kernel refuses, before anything is sent."""
    if (flat.dtype, op) in _reduced:
        return
    try:
        _torch.in_plain_mode(lambda: REDUCTIONS[op](flat[:0], flat[:0]))
    except RuntimeError as error:
        raise DTypeError(
            message(
                f"torch has no {op} for this dtype",
                expected="a dtype that torch reduces so",
                got=f"{flat.dtype}: {error}",
                remedy="convert the tensor first, or reduce it otherwise",
            )
        ) from error
    _reduced.add((flat.dtype, op))


def _in_mode_of(tensors: Any, work: Callable[[], object]) -> None:
    """Write to tensors, in inference mode if they are of it."""
    if tensors[0].is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            work()
    else:
        work()


def _facts(flat: Tensor) -> tuple[int, int]:
    return _DTYPE_NUMBER[flat.dtype], flat.numel()


def _elements(tensor: Tensor, rows: Sequence[int]) -> list[int]:
    each = tensor.numel() // tensor.shape[0] if tensor.shape[0] else 0
    return [row * each for row in rows]


class _Shown:
    """A call in words, for errors: its name, its tensors, and where it was begun."""

    __slots__ = ("_call", "_inputs", "_outputs", "_site")

    def __init__(self, call: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        self._call, self._inputs, self._outputs = call, inputs, outputs
        self._site: Site = None

    def begun(self) -> None:
        """Keep where the call is made: it may be finished elsewhere."""
        self._site = call_site()

    def __call__(self) -> str:
        to = f" -> {show_tensors(self._outputs)}" if self._outputs else ""
        return f"{self._call}  {show_tensors(self._inputs)}{to}  {show_site(self._site or call_site())}"


def _forget_all() -> None:
    progress.forget()
    for group in list(_groups):
        group.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
