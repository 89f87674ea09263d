"""The deferred check: the ranks compare their calls after they were made, without waiting for a device.

A call appends its check to the log of its group, and is made at once. A thread of each rank sends the digests of new
calls to the hub: a thread in the process of one rank, which compares the logs of all ranks. The logs are sent before an
optimizer steps, by `gradmesh.join`, at the end of a launched function and at exit, where the rank waits for the answer;
where a rank has made no call for a quarter of a second; and once a second otherwise. The first difference is an error
on every rank of the group, with every rank's call: at its next call, or where it waits for the answer.

Ranks that cannot continue are found too. A rank is blocked if calls of its are unmatched and none of its threads that
make calls has moved for `_STILL` seconds. A blocked rank that waits for a rank which has ended, or for another blocked
rank that waits for it, directly or not, raises DeadlockError. So does any rank that waits for longer than
GRADMESH_HANG.

A rank that is blocked in a call of torch cannot raise. So the process groups of such a rank are aborted, and the
connections between the ranks' processes that C++ code has opened, such as those of Gloo, are shut down: the call
returns, and raises.

The connections are made over TCP rather than by a process group, since a collective would need every rank at the same
time, and its thread could not be stopped. The first rank with a deferred call is the hub; its address and a random
token, which every connection has to send first, are in the store of the process group. If its process ends before the
others', the next one takes its place.

A message is a JSON object, recognised by the key that only it has, and bytes. A rank sends:

    token      first of all: its `rank`, and the ranks that it knows to be `gone`
    post       logs with new calls (name, first call, number of calls, how many are awaited, members, whether they are
               messages; the digests follow as bytes);
               whether it waits to `step`; how many functions were `launched`
    blocked    whether it is blocked, the call that it is in if that is compared `at_once`, and how many such it `met`
    words      the answer to `ask`: each call as text, `where` its threads are, the `ends` of its connections
    returned   how many launched functions have returned
    bye        how it ends, last of all

and the hub:

    agreed     for each log, how many calls were compared; with `step`, the rank may step
    ask        describe these calls, because they differ or a rank is blocked
    hurry      send the calls made by now, and the next one: a rank waits for them before a step
    notice     a text to print: for whom the rank waits
    mismatch   the first call that differs, with every rank's words: the rank's error
    hang       what every blocked rank waits for: the rank's error
    closing    the hub ends and another one takes its place; failed: it has ended with this error
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from gradmesh import _torch
from gradmesh._util.call_sites import call_site, is_of_the_program, stack_of
from gradmesh._util.environment import HANG
from gradmesh.backends import threads
from gradmesh.backends.own_group import FLAGS
from gradmesh.errors import AbortedError, CheckWarning, DeadlockError, GradmeshError, MismatchError, message
from gradmesh.runtime.mesh import Axis
from gradmesh.runtime.state import RETURNED, rank_state
from gradmesh.transport.call_checks import (
    RECEIVES,
    MessageCheck,
    OpCallCheck,
    calls_at_once,
    calls_of,
    flags_conflict,
    signed,
    without_backward,
)

_TICK = 0.25
"""Seconds after which a rank looks whether it has made calls, and posts if it has not."""
_SELDOM = 1.0
"""Seconds between two posts of a rank that goes on making calls and waits for nothing."""
_STILL = 0.5
"""Seconds without a movement of its threads after which a rank with unmatched calls is blocked."""
_STEP = 1.0
"""Seconds that a rank waits before an optimizer step for the others to come to theirs."""
_GRACE = 0.25
"""Seconds that a rank gets to raise an error by itself before it is printed and the process groups are aborted."""
_NOTICE = 5.0
"""Seconds after which a rank prints for whom it waits, if that rank may only be busy."""
_ANSWER = 5.0
"""Seconds that the ranks get to describe their calls."""
_CONNECT = 10.0
"""Seconds to connect to the hub."""
_AT_EXIT = 2.0
"""Seconds that a rank waits at exit for the comparison of its last calls."""
_HEAD = struct.Struct("!II")
_HELLO = 1 << 20
"""The most bytes of a message of a connection that has not sent the token."""
_NUMBERS = 3
"""How many numbers are sent of a call."""
_BYTES = 8 * _NUMBERS
_KEY = "gradmesh/deferred check"
_RETURNED = "has returned from the launched function"
_CANNOT = "no such call, because its operand of the forward call requires no gradient"

Message = dict[str, Any]


class _Connection:
    """Messages over a socket: JSON and bytes, each with its length before it."""

    def __init__(self, sock: socket.socket, limit: int | None = None) -> None:
        self.sock = sock
        self.limit = limit  # the most bytes of a message that are received; None: any number
        self._got = bytearray()
        self._sending = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, said: Message, blob: bytes = b"") -> bool:
        """Send a message; False if the other end is gone."""
        text = json.dumps(said).encode()
        with self._sending:
            try:
                self.sock.sendall(_HEAD.pack(len(text), len(blob)) + text + blob)
            except (OSError, ValueError):
                return False
        return True

    def receive(self) -> list[tuple[Message, bytes]] | None:
        """The messages that have arrived; None if the other end is gone or sends something else."""
        try:
            some = self.sock.recv(1 << 16)
        except TimeoutError:
            return []
        except (OSError, ValueError):
            return None
        if not some:
            return None
        got, found = self._got, []
        got += some
        while len(got) >= _HEAD.size:
            text, blob = _HEAD.unpack_from(got)
            end = _HEAD.size + text + blob
            if self.limit is not None and end > self.limit:
                return None
            if len(got) < end:
                break
            try:
                said = json.loads(got[_HEAD.size : _HEAD.size + text])
            except ValueError:
                return None
            if not isinstance(said, dict):
                return None
            found.append((said, bytes(got[_HEAD.size + text : end])))
            del got[:end]
        return found

    def close(self) -> None:
        """Close the socket; a thread that reads from it is woken."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


# -- on each rank


class Log:
    """The calls of one rank on one group that were not compared yet, or its messages off the CPU to and from `peer`."""

    def __init__(self, checker: Checker, axis: Axis, peer: int | None = None) -> None:
        self.checker = checker
        self.group = weakref.ref(axis.group)
        self.name = _name(axis, peer)
        self.members = list(axis.global_ranks)
        self.messages, self.lock = peer is not None, threading.RLock()
        if peer is not None:
            self.members = [self.members[end] for end in sorted((axis.rank, peer))]
        self.axis = str(axis)
        # the calls' checks, in order; those that were compared are removed
        self.entries: list[OpCallCheck] = []
        self.numbers = array("q")  # what is sent of each of them: digest, flags, and checksum of the counts
        self.first = 0  # how many were removed
        self.posted = 0  # how many were sent to the hub
        self.made = 0  # how many were made
        self.awaited = 0  # how many of these a step waits for: of messages all up to the last `recv`
        self.ahead = 0  # how many are compared before the next one is made
        self.known = False  # whether the hub has the log
        self.last: OpCallCheck | None = None  # the last call
        self._met: set[int] = set()

    def note(self, check: OpCallCheck, balance: int, refused: str = "") -> None:
        """Append a call, before it is made; `balance` is the checksum of its counts, `refused` why this rank aborts it.

        Raises:
            MismatchError: an earlier call differs between the ranks.
            DeadlockError: ranks cannot continue.
        """
        checker = self.checker
        if checker.error is not None and not refused:
            checker.fail()
        check.site, check.refused = call_site(), refused
        checker.threads.add(threading.get_ident())
        flags = check.flags | check.logged_origin << _ORIGIN
        # In this order, since the thread that posts reads them meanwhile.
        self.numbers.extend((check.digest, flags, signed(balance) if balance else 0))
        self.entries.append(check)
        self.made += 1
        if not self.messages or balance == RECEIVES:
            self.awaited = self.made
        self.last = check
        if checker.hurry:
            checker.hurry = False
            with checker._lock:
                checker._post()
        if (recorded := check.recorded) is not None:
            recorded.logged, recorded.site = self.made, check.site
        if (kind := check.kind) not in self._met and not refused:
            self._met.add(kind)
            self.awaited = self.ahead = self.made
            checker.flush([self])


def note(axis: Axis, check: OpCallCheck, balance: int = 0, refused: str = "") -> None:
    """Append a call to the log of its group; see `Log.note`."""
    calls = check.calls
    log = calls.log
    if log is None or log.checker.closed:
        log = calls.log = _open(axis)
    if log is not None:
        log.note(check, balance, refused)


@contextlib.contextmanager
def note_message(axis: Axis, verb: str, peer: int, greeting: str, refused: str = "") -> Iterator[None]:
    """Append one end of a message off the CPU to the log of the two ranks; the block makes it.

    As for `Log.note`; `peer` is the rank at the other end, `greeting` describes the message.
    """
    log = _open(axis, peer)
    with contextlib.nullcontext() if log is None else log.lock:
        if log is not None:
            check = MessageCheck(verb, axis, peer, greeting)
            if refused:
                check.digest = ~check.digest
            log.note(check, check.balance, refused)
        yield


def _name(axis: Axis, peer: int | None) -> str:
    name: str = axis.group.group_name
    return name if peer is None else f"{name}, messages of {min(axis.rank, peer)} and {max(axis.rank, peer)}"


def _open(axis: Axis, peer: int | None = None) -> Log | None:
    state = rank_state()
    with _opening[0]:
        checker = state.deferred_check
        if isinstance(checker, Checker) and checker.off and checker.is_of_this_world():
            return None
        if not isinstance(checker, Checker) or checker.closed or not checker.is_of_this_world():
            if isinstance(checker, Checker):
                checker.close()
            state.deferred_check = checker = Checker()
        return checker.open(axis, peer)


_opening = [threading.Lock()]


class Checker:
    """The deferred check of one rank."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # the error that was found; every further call raises it
        self._reason: Exception | None = None
        self.logs: dict[str, Log] = {}  # the logs of its groups, by name
        self.threads: set[int] = {threading.get_ident()}  # the threads that make calls
        self.closed = False  # whether it has ended
        self._at_once: tuple[str, int, list[int]] | None = None
        self.returned = 0  # the functions launched when the last one of them returned; 0: none has
        if threads.here.kept is None:
            self.threads.add(threading.main_thread().ident or 0)
        self.rank = dist.get_rank()
        self._state = rank_state()
        self._world = weakref.ref(dist.group.WORLD)
        self._store = _own_store()
        self._raised = self._refused = self._stepping = False
        self._failed = "", 0
        self._ends: list[list[str]] = []
        self.off = ""  # why it cannot compare calls
        self.hurry = False  # whether the next call is sent at once, since a rank waits for it before a step
        self._gone: dict[int, str] = {}
        self._hub: Hub | None = None
        self._hub_rank = -1
        self._connection: _Connection | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._take_place = None if threads.here.kept is None else threads.stand_in()
        self._thread = threading.Thread(target=self._run, name="gradmesh deferred check", daemon=True)
        _checkers.add(self)
        _watch_steps()
        self._thread.start()

    def is_of_this_world(self) -> bool:
        """Whether the process group that it was made in still exists."""
        world = self._world()
        return world is not None and dist.is_initialized() and dist.group.WORLD is world

    def open(self, axis: Axis, peer: int | None = None) -> Log:
        """The log of a group, or of the messages to and from one of its ranks."""
        with self._lock:
            name = _name(axis, peer)
            return self.logs.get(name) or self.logs.setdefault(name, Log(self, axis, peer))

    def fail(self) -> None:
        """Raise the error that was found."""
        assert self.error is not None
        self._raised = True
        raise self.error

    def verdict(self, error: Exception) -> Exception | None:
        """The error that a failed call of a backend is a consequence of, if there is one, once it is known."""
        self._failed = str(error).partition("\n")[0], self._made()
        begin = time.monotonic()
        with self._changed:
            if pending := any(log.entries for log in self.logs.values()):
                self._post()
            while pending and not (self.error or self.off or self.closed):
                if time.monotonic() - begin > (4 * _STILL if self._reason else _STILL + _ANSWER):
                    break
                self._changed.wait(_TICK)
            self._raised = self.error is not None
            of_backend = isinstance(error, AbortedError) or not isinstance(error, GradmeshError)
            return self.error or (self._reason if of_backend else None)

    @contextlib.contextmanager
    def at_once(self, axis: Axis) -> Iterator[None]:
        """The block makes a call of CPU tensors, which is compared at once, and in which this rank may wait."""
        with contextlib.suppress(GradmeshError):  # the group was destroyed, and Gloo still sends over it
            self._at_once = axis.group.group_name, calls_of(axis.group).met, axis.global_ranks
        try:
            yield
        finally:
            self._at_once = None

    def finish(self) -> None:
        """Compare the last calls of a function of the rank that has returned.

        Raises:
            MismatchError: calls differ between the ranks, and the function has not received that error.
            DeadlockError: ranks cannot continue; as well.
        """
        if not self._raised:
            try:
                self.flush()
            except (DeadlockError, MismatchError):
                if not self._refused:
                    raise
        with self._lock:
            self.returned = self._state.launched
            if self._connection is not None and not self.closed:
                self._connection.send({"returned": self.returned})

    def flush(self, logs: Iterable[Log] | None = None, *, at_exit: bool = False, step: bool = False) -> None:
        """Wait until the calls that this rank has made, or those in `logs`, were compared, and all sent to the hub.

        `at_exit` for the messages that were sent too, but only for some seconds; before the `step` of an optimizer,
        which uses the gradients, for the other ranks to come to theirs, too.

        Raises:
            MismatchError: calls differ between the ranks.
            DeadlockError: ranks cannot continue.
        """
        if self.closed or os.getpid() != _process[0]:
            return
        deadline = time.monotonic() + _AT_EXIT if at_exit else None
        with self._changed:
            wanted = [
                (log, log.made if at_exit else log.awaited, log.made)
                for log in (self.logs.values() if logs is None else logs)
            ]
            if step:
                self._stepping = True
            self._post(step=step)
            while self.error is None:
                if all(log.first >= awaited and log.posted >= made for log, awaited, made in wanted) and not (
                    step and self._stepping
                ):
                    return
                left = None if deadline is None else deadline - time.monotonic()
                if self.off or self.closed or (left is not None and left <= 0):
                    break
                self._changed.wait(left)
        if self.error is not None:
            self.fail()
        if self.off and self.is_of_this_world():
            self.close()
            warnings.warn(
                message(
                    "the ranks' calls are not compared",
                    op="check",
                    expected="a TCP connection between the ranks' hosts, for the deferred check",
                    got=self.off,
                    remedy="open the ports between the hosts if none can be made, and report any other error; "
                    "GRADMESH_CHECK=0 turns the check off",
                ),
                CheckWarning,
                stacklevel=2,
            )

    def close(self, *, wait: bool = True) -> None:
        """End the threads and close the connections; called by any thread."""
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._changed.notify_all()
            if self._connection is not None:
                self._post()
                self._connection.send({"bye": "has left the process group"})
                self._connection.close()
        if self._hub is not None:
            self._hub.close()
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(_AT_EXIT)
        for log in self.logs.values():
            log.entries.clear()

    def at_exit(self) -> None:
        """Compare the last calls, and end."""
        if not self._raised:
            try:
                self.flush(at_exit=True)
            except (RuntimeError, ValueError) as error:
                print(error, file=sys.stderr)
        self.close()

    def drop(self) -> None:
        """In a forked child: close the sockets, and send nothing."""
        self.closed = True
        if self._connection is not None:
            self._connection.sock.close()
        if self._hub is not None:
            self._hub.drop()

    # -- the thread

    def _run(self) -> None:
        if self._take_place is not None:
            self._take_place()
        try:
            generation = 0
            while not self.closed and self.error is None:
                connection = self._connect(generation)
                if connection is not None:
                    self._talk(connection)
                    connection.close()
                generation += 1
        except Exception as error:  # a thread that ends must not leave a rank that waits for it
            with self._changed:
                self.off = _words_of(error)
                self._changed.notify_all()
        finally:
            if self.error is not None:
                self._escalate()

    def _connect(self, generation: int) -> _Connection | None:
        """Connect to the hub of a generation, which this rank becomes if there is none; None if it has ended."""
        key = f"{_KEY}/{generation}"
        if self._store.check([key]):
            address = self._store.get(key).decode()
        else:
            own = Hub(self._store, self.rank)
            address = self._store.compare_set(key, "", own.address).decode()
            if address == own.address:
                self._hub = own
                own.start()
            else:
                own.drop()
        where = json.loads(address)
        self._hub_rank = where["rank"]
        for host in where["hosts"]:
            with contextlib.suppress(OSError):
                connection = _Connection(socket.create_connection((host, where["port"]), _CONNECT))
                gone = {str(rank): how for rank, how in self._gone.items()}
                connection.send({"token": where["token"], "rank": self.rank, "gone": gone})
                with self._changed:
                    for log in self.logs.values():
                        log.posted, log.known = log.first, False
                    self._connection = connection
                    self._post(step=self._stepping)
                    self._changed.notify_all()
                    connection.send({"returned": self.returned})
                return connection
        if generation > len(self._gone) + 8:
            raise ConnectionError(f"no connection to {where['hosts']}, port {where['port']}")
        return None

    def _talk(self, connection: _Connection) -> None:
        """Read from the hub until it or this rank ends."""
        connection.sock.settimeout(_TICK)
        still = _Still()
        begin = posted = time.monotonic()
        made = -1
        while not self.closed:
            messages = connection.receive()
            if messages is None:
                if self._hub_rank != self.rank:
                    self._gone.setdefault(self._hub_rank, "has ended")
                break
            for said, _ in messages:
                self._answer(connection, said)
            if self.error is not None:
                return
            if (now := time.monotonic()) - begin < _TICK:
                continue
            begin = now
            if not self.is_of_this_world():
                self.close()
                return
            with self._lock:
                before, made = made, self._made()
                at_once, pending = self._at_once, any(log.entries for log in self.logs.values())
                waits = made == before and (pending or self._stepping or at_once is not None)
                if waits or now - posted >= _SELDOM:
                    self._post()
                    posted = now
            blocked = waits and (bool(self._failure()) or still.since(self.threads) > _STILL)
            if not waits:
                still.moved()
            if blocked != still.reported:
                still.reported = blocked
                connection.send({"blocked": blocked, "at_once": at_once, "met": calls_at_once()})

    def _made(self) -> int:
        with self._lock:
            return sum(log.made for log in self.logs.values())

    def _failure(self) -> str:
        """The error of the last call, if it has failed; "": it has not."""
        text, made = self._failed
        return text if made == self._made() else ""

    def _post(self, *, step: bool = False) -> None:
        """Send the digests of new calls, and that an optimizer is about to step; called with the lock."""
        if self._connection is None:
            return
        logs, blob = [], bytearray()
        for log in self.logs.values():
            begin, new = log.posted - log.first, log.made - log.posted
            if log.known and not new:
                continue
            log.known = True
            blob += log.numbers[_NUMBERS * begin : _NUMBERS * (begin + new)].tobytes()
            logs.append([log.name, log.posted, new, log.ahead, log.members, log.messages])
            log.posted += new
        if logs or step:
            launched = self._state.launched
            self._connection.send({"post": logs, "step": step, "launched": launched}, bytes(blob))

    def _answer(self, connection: _Connection, said: Message) -> None:
        if "agreed" in said:
            with self._changed:
                for name, count in said["agreed"].items():
                    log = self.logs[name]
                    if count > log.first:
                        del log.numbers[: _NUMBERS * (count - log.first)], log.entries[: count - log.first]
                        log.first = count
                self._stepping = self._stepping and "step" not in said
                self._changed.notify_all()
        elif "ask" in said:
            words = [self._words(name, index) for name, index in said["ask"]]
            failure = self._failure()
            where = show_place(self.threads) + (f", whose call failed: {failure}" if failure else "")
            connection.send({"words": words, "number": said["number"], "where": where, "ends": connections()})
        elif "closing" in said:
            self._gone |= {int(rank): how for rank, how in said["closing"].items()}
        elif "hurry" in said:
            self.hurry = True
            with self._lock:
                self._post()
        elif "notice" in said:
            print(said["notice"], file=sys.stderr, flush=True)
        elif "failed" in said:
            raise RuntimeError(f"the comparison on rank {self._hub_rank} has ended with {said['failed']}")
        else:
            self._found(said)

    def _words(self, name: str, index: int) -> str:
        """A call as text; "" if this rank did not make it, or no longer has it."""
        log = self.logs.get(name)
        if log is None:
            return ""
        with self._lock:
            check = log.entries[index - log.first] if 0 <= index - log.first < len(log.entries) else None
        if check is None and index == log.made - 1:
            check = log.last
        return "" if check is None else check.said()

    def _found(self, said: Message) -> None:
        """Make the error that every further call raises."""
        if "mismatch" in said and said["own"]:
            name, index = said["mismatch"]
            with self._lock:
                log = self.logs[name]
                check = log.entries[index - log.first] if log.first <= index < log.made else log.last
            if check is None:
                raise RuntimeError("this rank has made no call that differs")
            error = check.mismatch(said["words"], said["flags"])
            self._refused = self._raised = bool(check.refused)  # it has raised the reason
        else:
            axis = self.logs.get(said.get("axis", ""))
            error = DeadlockError.of(
                said.get("hang", "ranks that this one needs have ended, since their calls do not match"),
                axis=None if axis is None else axis.axis,
                expected="every rank of an axis makes the same calls, in the same order",
                got="\n".join(said["lines"] if "lines" in said else said["words"]),
                remedy=_SEND_REMEDY
                if "hang" in said and any(" send(to=" in line for line in said["words"])
                else _HANG_REMEDY,
            )
        with self._changed:
            if said["own"]:
                self.error, self._ends = error, said["ends"]
            else:
                self._reason = self._reason or error
            self._changed.notify_all()

    def _escalate(self) -> None:
        """Print the error if the rank has not raised it, and abort what it or its device waits for."""
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and not self._raised and not self.closed:
            time.sleep(0.02)
        if not self._raised and not self.closed:
            print(self.error, file=sys.stderr, flush=True)
        self._release()
        while not self._raised and not self.closed:
            time.sleep(_GRACE)
            shut_down(self._ends, self._store)  # those that Gloo opened after the ranks were asked

    def _release(self) -> None:
        """Make the calls return that wait for other ranks."""
        for log in self.logs.values():
            group = log.group()
            if group is not None and log.entries:
                with contextlib.suppress(Exception):  # a backend that cannot abort
                    _torch.abort_group(group)
        shut_down(self._ends, self._store)


def _words_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


class _Still:
    """Since when the threads of a rank have not moved."""

    def __init__(self) -> None:
        self.reported = False
        self._places: object = None
        self._begin = time.monotonic()

    def moved(self) -> None:
        """Forget what was seen."""
        self._places = None

    def since(self, idents: Iterable[int]) -> float:
        """Seconds in which none of the threads has moved."""
        places = [(ident, [place[:2] for place in stack_of(ident)]) for ident in sorted(idents)]
        if places != self._places:
            self._places, self._begin = places, time.monotonic()
        return time.monotonic() - self._begin


def show_place(idents: Iterable[int]) -> str:
    """The innermost line of the program in the first of these threads that is in one."""
    for ident in sorted(idents, key=lambda ident: ident != threading.main_thread().ident):
        for code, _, line in stack_of(ident):
            if is_of_the_program(code.co_filename):
                return f"at {code.co_filename}:{line} in {code.co_name}"
    return "at an unknown place"


def _own_store() -> Any:
    """The store of the process group, by a connection of its own: a wait on the shared one would block this one."""
    store = _torch.default_store()
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        return store.clone()
    return store


_ORIGIN = 40
"""The bits of the flags that are sent from which on is the number in the log of the call that it is the backward of."""
_REMEMBERED = 1 << 14
"""How many calls the hub remembers of which some ranks run no backward."""
_HANG_REMEDY = (
    "compare the call sites above: make every call on every rank, or on none; where a rank's backward is missing, use "
    "the result on every rank or run the step inside `with gradmesh.ordered():`"
)
_SEND_REMEDY = (
    "off the CPU the first send to a rank waits for its recv: make both before either rank waits for another call, or "
    "use gradmesh.permute, which every rank of the axis calls"
)

_checkers: weakref.WeakSet[Checker] = weakref.WeakSet()
_process = [os.getpid()]
_hooked: list[object] = []
_hooking = threading.Lock()


def _watch_steps() -> None:
    """Compare the calls before an optimizer uses the gradients, once per process."""
    with _hooking:
        if not _hooked:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            _hooked.append(register_optimizer_step_pre_hook(_before_step))
            atexit.register(_end)
            os.register_at_fork(after_in_child=_forked)


def _before_step(*_: object) -> None:
    checker = rank_state().deferred_check
    if isinstance(checker, Checker) and checker.logs:
        # A step within a backward does not end it.
        checker.flush(step=not _torch.in_backward())


def _end() -> None:
    for checker in list(_checkers):
        checker.at_exit()


def _forked() -> None:
    """A child has no threads of its parent, and must not keep the connections open."""
    _process[0], _opening[0] = os.getpid(), threading.Lock()
    for checker in list(_checkers):
        checker.drop()


# -- the hub


@dataclass
class _Peer:
    """A rank as the hub sees it."""

    connection: _Connection | None = None  # its connection; None: it has ended
    blocked: float | None = None  # since when it is blocked, by `time.monotonic`; None: it is not
    # where it is blocked, the group, number and ranks of a call that compares at once; None: in none
    at_once: list[Any] | None = None
    met: dict[str, int] = field(default_factory=dict)  # how many of these it had come to, on each group
    launched: int = 0  # how many functions had been launched when it last posted calls
    returned: int = 0  # how many had been launched when the last one that has returned was; 0: none has
    ended: str = ""  # how it has ended; "": it runs
    steps: int = 0  # how many steps of optimizers it has announced
    stepping: float | None = None  # since when it waits before a step; None: it does not


@dataclass
class _Stream:
    """What the hub has of the log of one rank, from the call with the number `start`; the rank waits for `ahead`."""

    start: int = 0
    ahead: int = 0
    numbers: array[int] = field(default_factory=lambda: array("q"))

    @property
    def count(self) -> int:
        """The number of calls of the rank."""
        return self.start + len(self.numbers) // _NUMBERS

    def part(self, first: int, last: int) -> list[array[int]]:
        """The digests, flags and checksums of some calls."""
        numbers = self.numbers[_NUMBERS * (first - self.start) : _NUMBERS * (last - self.start)]
        return [numbers[which::_NUMBERS] for which in range(_NUMBERS)]

    def forget(self, first: int) -> None:
        """Drop the calls before one."""
        if first > self.start:
            del self.numbers[: _NUMBERS * (first - self.start)]
            self.start = first


@dataclass
class _Group:
    """The logs of one group, or of the messages of two ranks."""

    members: list[int]  # its global ranks
    messages: bool  # whether they are of messages, which a rank that sends does not wait for
    streams: dict[int, _Stream] = field(default_factory=dict)
    # the ranks that run no backward of a call, by its number in the log, where others do
    backwardless: dict[int, list[int]] = field(default_factory=dict)
    agreed: int = 0  # how many calls were compared
    failed: bool = False  # whether its ranks have an error

    def count(self, rank: int) -> int:
        """The number of calls of a rank."""
        stream = self.streams.get(rank)
        return self.agreed if stream is None else max(self.agreed, stream.count)

    @property
    def least(self) -> int:
        """The number of calls that every rank has made."""
        return min(map(self.count, self.members))

    def awaited(self, rank: int) -> list[int]:
        """The numbers of the calls of a rank that are not compared and wait for the others."""
        calls = range(self.agreed, self.count(rank))
        if not self.messages:
            return [*calls]
        stream = self.streams[rank]
        balances = stream.part(self.agreed, self.count(rank))[2]
        numbered = zip(calls, balances, strict=True)
        return [number for number, balance in numbered if balance == RECEIVES or number < stream.ahead]

    def late(self, rank: int) -> list[int]:
        """The ranks that have not made some call that a rank waits in."""
        made = 1 + max(self.awaited(rank), default=-1)
        return [other for other in self.members if self.count(other) < made]

    def compare(self) -> tuple[int, list[int] | None] | None:
        """Compare the calls that all ranks have made.

        Returns:
            The number of the first call that differs, and the ranks' flags if they are what conflicts.
        """
        if any(rank not in self.streams for rank in self.members):
            return None
        streams = [self.streams[rank] for rank in self.members]
        first, last = max(self.agreed, *(stream.start for stream in streams)), self.least
        if last <= first:
            return None
        digests, flags, balances = zip(*(stream.part(first, last) for stream in streams), strict=True)
        same = all(one == digests[0] for one in digests) and all(one == flags[0] for one in flags)
        if not same or any(map(any, balances)):
            for number in range(last - first):
                if len({one[number] for one in digests}) > 1 or sum(one[number] for one in balances) % 2**64:
                    return first + number, None
                seen = [one[number] & FLAGS for one in flags]
                if len(set(seen)) > 1:
                    if flags_conflict(seen):
                        return first + number, seen
                    if without := without_backward(seen):
                        self.backwardless[first + number + 1] = without
        self.agreed = last
        for stream in streams:
            stream.forget(last)
        return None

    def unmatched(self) -> tuple[int, list[int]] | None:
        """A backward call that is not compared yet, and the ranks (their places) that cannot make it."""
        while len(self.backwardless) > _REMEMBERED:
            del self.backwardless[next(iter(self.backwardless))]
        for stream in self.streams.values() if self.backwardless else ():
            for number, flags in enumerate(stream.part(stream.start, stream.count)[1]):
                if without := self.backwardless.get(flags >> _ORIGIN):
                    return stream.start + number, without
        return None


@dataclass
class _Question:
    """What the hub asks ranks, and what it does with the answers."""

    asked: dict[int, list[tuple[str, int]]]
    then: Callable[[dict[int, Message]], None]
    answers: dict[int, Message] = field(default_factory=dict)
    deadline: float = field(default_factory=lambda: time.monotonic() + _ANSWER)


class Hub:
    """The thread that compares the logs of all ranks, in the process of one."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        interface, hosts = _hosts(store)
        self._listener = socket.create_server((interface, 0), backlog=1024)
        self._token = secrets.token_hex(16)
        # For the store: where it listens, and the token that a connection has to send first.
        self.address = json.dumps(
            {"rank": rank, "hosts": hosts, "port": self._listener.getsockname()[1], "token": self._token}
        )
        self._select = selectors.DefaultSelector()
        self._select.register(self._listener, selectors.EVENT_READ)
        self._peers: dict[int, _Peer] = {}
        self._ranks: dict[_Connection, int | None] = {}
        self._groups: dict[str, _Group] = {}
        self._questions: dict[int, _Question] = {}
        self._failures: list[tuple[set[int], Message]] = []
        self._ends: dict[int, list[list[str]]] = {}
        self._asked = 0
        self._noticed: set[str] = set()
        self._agreed: dict[int, dict[str, int]] = {}
        self._hurried: set[tuple[int, int]] = set()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="gradmesh deferred check hub", daemon=True)

    def start(self) -> None:
        """Start to listen."""
        self._thread.start()

    def close(self) -> None:
        """End; the ranks choose another hub."""
        self._ending = True
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            with contextlib.suppress(OSError):  # wakes it
                self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join(_AT_EXIT)

    def drop(self) -> None:
        """Close the sockets, and send nothing."""
        self._listener.close()
        self._select.close()
        for connection in self._ranks:
            connection.sock.close()

    def _run(self) -> None:
        try:
            while not self._ending:
                self._turn()
            gone = {
                rank: peer.ended for rank, peer in self._peers.items() if peer.ended and not peer.connection
            }
            last: Message = {"closing": gone}
        except Exception as error:  # the ranks that wait for an answer have to know
            last = {"failed": _words_of(error)}
        for connection in list(self._ranks):
            connection.send(last)
            connection.close()
        self._select.close()
        self._listener.close()

    def _turn(self) -> None:
        """Read what has arrived, and answer."""
        peers = self._peers.values()
        waits = self._questions or any(
            peer.blocked is not None or peer.stepping is not None for peer in peers
        )
        for key, _ in self._select.select(_TICK if waits else None):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)
        for number, question in list(self._questions.items()):
            left = question.deadline - time.monotonic()
            if left < 0 or (
                left < _ANSWER - 1
                and not any(map(self._runs, question.asked.keys() - question.answers.keys()))
            ):
                self._finish(number)
        self._let_go_on()
        self._look_for_hangs()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.settimeout(_CONNECT)
        connection = _Connection(sock, _HELLO)
        self._ranks[connection] = None
        self._select.register(sock, selectors.EVENT_READ, connection)

    def _read(self, connection: _Connection) -> None:
        messages = connection.receive()
        if messages is None:
            self._lose(connection, "has ended")
            return
        for said, blob in messages:
            rank = self._ranks.get(connection)
            if rank is None:
                if not secrets.compare_digest(str(said.get("token")), self._token):
                    self._lose(connection, "")
                    return
                connection.limit = None
                self._ranks[connection] = int(said["rank"])
                self._peers[int(said["rank"])] = _Peer(connection)
                for other, how in said["gone"].items():
                    self._peers.setdefault(int(other), _Peer(ended=how))
                for ranks, failed in self._failures:
                    if int(said["rank"]) in ranks:
                        self._send(int(said["rank"]), failed)
                for number, asked in self._questions.items():
                    if (calls := asked.asked.get(int(said["rank"]))) is not None:
                        self._send(int(said["rank"]), {"ask": calls, "number": number})
            elif "post" in said:
                if said["step"]:
                    self._peers[rank].steps += 1
                    self._peers[rank].stepping = time.monotonic()
                self._peers[rank].launched = said["launched"]
                self._posted(rank, said["post"], blob)
            elif "blocked" in said:
                self._peers[rank].blocked = time.monotonic() if said["blocked"] else None
                self._peers[rank].at_once, self._peers[rank].met = said["at_once"], said["met"]
            elif "returned" in said:
                self._peers[rank].returned = said["returned"]
            elif "words" in said:
                self._ends[rank] = said["ends"]
                question = self._questions.get(said["number"])
                if question is not None:
                    question.answers[rank] = said
                    if len(question.answers) == len(question.asked):
                        self._finish(said["number"])
            elif "bye" in said:
                self._lose(connection, said["bye"])
                return

    def _lose(self, connection: _Connection, how: str) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._select.unregister(connection.sock)
        connection.close()
        rank = self._ranks.pop(connection, None)
        if rank is not None:
            peer = self._peers[rank]
            peer.connection, peer.blocked, peer.at_once, peer.stepping = None, None, None, None
            peer.ended = peer.ended or how

    def _posted(self, rank: int, logs: Sequence[Any], blob: bytes) -> None:
        at, changed = 0, []
        # It is asked again for what it has not made yet.
        self._hurried = {pair for pair in self._hurried if pair[0] != rank}
        for name, start, count, ahead, members, messages in logs:
            group = self._groups.get(name)
            if group is None:
                group = self._groups[name] = _Group(members, messages)
            stream = group.streams.get(rank)
            if stream is None or stream.count != start:
                stream = group.streams[rank] = _Stream(start)
                group.agreed = max(group.agreed, start)
                for member, each in group.streams.items():
                    if each.start < group.agreed:  # this hub's predecessor has compared them
                        self._agreed.setdefault(member, {})[name] = group.agreed
            stream.ahead = ahead
            stream.numbers.frombytes(blob[at : at + _BYTES * count])
            at += _BYTES * count
            changed.append((name, group))
        for name, group in changed:
            before = group.agreed
            if group.failed:
                continue
            found = group.compare()
            if found is not None:
                self._mismatch(name, group, *found)
            elif late := group.unmatched():
                self._mismatch(name, group, late[0], None, late[1])
            elif group.agreed > before:
                for member in group.members:
                    self._agreed.setdefault(member, {})[name] = group.agreed

    def _send(self, rank: int, said: Message) -> None:
        peer = self._peers.get(rank)
        if peer is not None and peer.connection is not None and not peer.connection.send(said):
            self._lose(peer.connection, "has ended")

    def _ask(
        self, asked: dict[int, list[tuple[str, int]]], then: Callable[[dict[int, Message]], None]
    ) -> None:
        """Have ranks describe calls; `then` gets the answers of those that gave one.

        The ranks of all their groups are asked for the ends of their connections too: a rank that fails because of one
        group may wait in another.
        """
        self._asked += 1
        # Those that have not connected are asked when they do.
        ended = {rank for rank, peer in self._peers.items() if peer.connection is None}
        reached = {rank: asked.get(rank, []) for rank in self._near({*asked}) - ended}
        self._questions[self._asked] = _Question(reached, then)
        for rank, calls in reached.items():
            self._send(rank, {"ask": calls, "number": self._asked})
        if not reached:
            self._finish(self._asked)

    def _finish(self, number: int) -> None:
        question = self._questions.pop(number)
        question.then(question.answers)

    def _runs(self, rank: int) -> bool:
        peer = self._peers.get(rank)
        return peer is not None and peer.connection is not None

    def _mismatch(
        self, name: str, group: _Group, index: int, flags: list[int] | None, without: Sequence[int] = ()
    ) -> None:
        group.failed = True

        def then(answers: dict[int, Message]) -> None:
            words = [
                _CANNOT
                if place in without
                else answers[rank]["words"][0]
                if rank in answers
                else f"a call that is not known: {self._how(rank)}"
                for place, rank in enumerate(group.members)
            ]
            lines = [f"rank {rank}: {each}" for rank, each in zip(group.members, words, strict=True)]
            said = {"mismatch": [name, index], "words": words, "flags": flags, "lines": lines}
            self._fail({*group.members}, said)

        self._ask({rank: [(name, index)] for rank in group.members}, then)

    def _how(self, rank: int) -> str:
        peer = self._peers.get(rank)
        if peer is None:
            return f"rank {rank} has made no call"
        returned = peer.returned and peer.returned >= max(other.launched for other in self._peers.values())
        silent = "does not answer" if peer.connection else "has made no call"
        return f"rank {rank} {peer.ended or (_RETURNED if returned else silent)}"

    def _has_ended(self, rank: int, waits: int) -> bool:
        """Whether a rank will not make the call for which another one waits.

        One that has returned may be behind that one by a function, and is then about to begin it.
        """
        peer, other = self._peers.get(rank), self._peers[waits]
        return peer is not None and (bool(peer.ended) or 0 < peer.returned >= other.launched)

    def _fail(self, ranks: set[int], said: Message) -> None:
        """Send ranks their error, with the ends of the connections of all ranks of their groups.

        The others of these keep it as the reason of a call that fails because those ranks have ended.
        """
        near = self._near(ranks)
        ends = [end for rank in near for end in self._ends.get(rank, ())]
        own = {**said, "own": True, "ends": ends}
        self._failures.append((ranks, own))  # for those that connect later
        for rank in [*ranks, *near - ranks]:
            self._send(rank, own if rank in ranks else {**said, "own": False, "ends": []})

    def _near(self, ranks: set[int]) -> set[int]:
        """The ranks of all groups that have one of these."""
        return {r for g in self._groups.values() if not ranks.isdisjoint(g.members) for r in g.members}

    # -- ranks that are about to use their gradients

    def _let_go_on(self) -> None:
        """Tell the ranks how many calls were compared, and those that wait before a step that they may."""
        agreed, self._agreed = self._agreed, {}
        for rank, peer in list(self._peers.items()):
            said: Message = {"agreed": agreed.get(rank, {})}
            if peer.stepping is not None and peer.connection is not None and self._may_step(rank, peer):
                peer.stepping = None
                said["step"] = peer.steps
            elif peer.stepping is not None:
                waits = self._waits(rank).items()
                needed = {(one, rank) for name, late in waits if self._groups[name].messages for one in late}
                for other, _ in needed - self._hurried:
                    self._send(other, {"hurry": True})
                self._hurried |= needed
            if len(said) > 1 or said["agreed"]:
                self._send(rank, said)

    def _may_step(self, rank: int, peer: _Peer) -> bool:
        assert peer.stepping is not None
        patient = time.monotonic() - peer.stepping < _STEP
        for group in self._groups.values():
            if rank not in group.streams:
                continue
            if group.failed:
                return False
            if group.awaited(rank):
                return False
            made = group.count(rank)
            if patient and any(
                group.count(other) <= made and self._is_awaited(other, rank) for other in group.members
            ):
                return False
        return True

    def _is_awaited(self, other: int, rank: int) -> bool:
        """Whether a rank has stepped as often as another one before that one's step, and may yet come to its own."""
        peer, stepping = self._peers.get(other), self._peers[rank]
        if peer is None:
            return stepping.steps == 1
        return not self._has_ended(other, rank) and peer.blocked is None and peer.steps == stepping.steps - 1

    # -- ranks that wait

    def _waits(self, rank: int, *, sends: bool = False) -> dict[str, list[int]]:
        """The groups in which a rank waits, each with the ranks that have not made the call; for receivers too."""
        waits = {}
        for name, group in self._groups.items():
            if rank not in group.streams or group.failed:
                continue
            late = group.late(rank)
            if group.messages and not late:  # a message that is never received stays on the device for ever
                others = [other for other in group.members if group.count(other) < group.count(rank)]
                self._look_for_returned({*others})
                late = [other for other in others if sends or self._has_ended(other, rank)]
            if late:
                waits[name] = late
        return waits

    def _look_for_hangs(self) -> None:
        now = time.monotonic()
        blocked = {rank for rank, peer in self._peers.items() if peer.blocked is not None and not peer.ended}
        waiting = {rank: found for rank in blocked if (found := self._waits(rank, sends=True))}
        if not waiting:
            return
        waits = {rank: found for rank in waiting if (found := self._waits(rank))}
        # The ranks that can go on: those that run, and those that wait only for ranks that can go on.
        needs = {rank: {other for late in found.values() for other in late} for rank, found in waits.items()}
        for rank in blocked:
            if (call := self._peers[rank].at_once) is not None:
                met = {other for other, peer in self._peers.items() if peer.met.get(call[0], 0) >= call[1]}
                needs[rank] = needs.get(rank, set()) | ({*call[2]} - {rank} - met)
        self._look_for_returned({other for others in needs.values() for other in others})
        since = {rank: now - (self._peers[rank].blocked or now) for rank in blocked}
        stuck = {
            rank
            for rank, others in needs.items()
            if others
            # A message does not make the host wait, which may be busy before it sends the one that others wait for.
            and not (
                since[rank] <= _NOTICE
                and rank in waits
                and all(self._groups[name].messages for name in waits[rank])
                and not any(self._has_ended(other, rank) for other in others)
            )
        }
        while True:
            freed = {
                rank
                for rank in stuck
                if not any(other in stuck or self._has_ended(other, rank) for other in needs[rank])
            }
            if not freed:
                break
            stuck -= freed
        if ends := {rank: late for rank, late in waits.items() if rank in stuck}:
            self._hang(ends, "ranks wait for calls that no rank will make")
            return
        limit = HANG.value()
        overdue = {rank: late for rank, late in waiting.items() if limit and since[rank] + _STILL >= limit}
        if overdue:
            self._hang(overdue, f"ranks have waited for {limit} s for calls of a rank that makes none")
            return
        long = {rank: late for rank, late in waiting.items() if since[rank] > _NOTICE}
        if long:
            self._notice(long)

    def _look_for_returned(self, ranks: set[int]) -> None:
        """Read from the store which functions have returned on ranks that have made no deferred call."""
        for rank in ranks:
            peer = self._peers.get(rank)
            if peer is None or (peer.connection is None and not peer.ended):
                with contextlib.suppress(RuntimeError):
                    if self._store.check([RETURNED.format(rank)]):
                        self._peers[rank] = _Peer(returned=int(self._store.get(RETURNED.format(rank))))

    def _table(self, waits: dict[int, dict[str, list[int]]], then: Callable[[str, list[str]], None]) -> None:
        """Describe where ranks wait and where the ranks are that they wait for."""
        asked: dict[int, list[tuple[str, int]]] = {}
        for rank, found in waits.items():
            asked[rank] = [
                (name, next(iter(self._groups[name].awaited(rank)), self._groups[name].agreed))
                for name in found
            ]
        for found in waits.values():
            for name, late in found.items():
                for rank in late:
                    if rank not in waits:
                        asked.setdefault(rank, []).append((name, self._groups[name].count(rank) - 1))

        def answered(answers: dict[int, Message]) -> None:
            lines, axis = [], next(name for found in waits.values() for name in found)
            for rank in sorted(asked):
                answer = answers.get(rank)
                for place, (name, index) in enumerate(asked[rank]):
                    words = answer["words"][place] if answer else ""
                    runs = answer is not None and not self._has_ended(rank, min(waits))
                    at = f"; it is {answer['where']}" if answer and runs else f"; {self._how(rank)}"
                    if rank in waits:
                        late = ", ".join(map(str, waits[rank][name]))
                        lines.append(
                            f"rank {rank}: waits for rank {late} in call {index + 1}, {words or 'unknown'}{at}"
                        )
                    else:
                        last = f", the last one {words}" if words else ""
                        lines.append(f"rank {rank}: has made {index + 1} calls{last}{at}")
            then(axis, lines)

        self._ask(asked, answered)

    def _hang(self, waits: dict[int, dict[str, list[int]]], problem: str) -> None:
        names = {name for found in waits.values() for name in found}
        for name in names:
            self._groups[name].failed = True
        ranks = {*waits, *(rank for name in names for rank in self._groups[name].members)}

        def then(axis: str, lines: list[str]) -> None:
            self._fail(ranks, {"hang": problem, "axis": axis, "words": lines})

        self._table(waits, then)

    def _notice(self, waits: dict[int, dict[str, list[int]]]) -> None:
        """Have one rank print who waits for whom, once for each call that is waited for."""
        key = repr(sorted((name, self._groups[name].least) for found in waits.values() for name in found))
        if key in self._noticed:
            return
        self._noticed.add(key)

        def then(_: str, lines: list[str]) -> None:
            text = message(
                "ranks wait for a rank that makes no call",
                op="check",
                got="\n".join(lines),
                remedy="nothing, if that rank is busy; GRADMESH_HANG=60 makes a longer wait than 60 s an error",
            )
            self._send(min(waits), {"notice": text})

        self._table(waits, then)


# -- addresses and sockets


def _hosts(store: Any) -> tuple[str, list[str]]:
    """The interface to listen on, and the names of this host that the other ranks can try."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())
    host, port = getattr(store, "host", ""), getattr(store, "port", 0)
    if alone or not host:
        return ("127.0.0.1", ["127.0.0.1"]) if alone or not host else ("", [socket.getfqdn()])
    family, kind, protocol, _, end = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(end)  # sends nothing
        own: str = probe.getsockname()[0]
    if own != end[0]:
        return own, [own]
    # The store is on this host: other hosts reach it by the name of the store.
    return "", [host, own]


def connections() -> list[list[str]]:
    """Both ends of each TCP connection of this process, as the kernel writes them; Linux alone.

    Of a socket that listens, the other one is "".
    """
    return [[local, remote] for local, remote, _ in _sockets()]


def _sockets() -> list[tuple[str, str, int]]:
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith("socket:["):
                    found[target[8:-1]] = int(fd)
    rows = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{table}") as lines:
            for columns in map(str.split, lines):
                if columns[3] in ("01", "0A") and columns[9] in found:
                    other = columns[2] if columns[3] == "01" else ""
                    rows.append((columns[1], other, found[columns[9]]))
    return rows


def shut_down(ends: Iterable[Sequence[str]], store: Any = None) -> None:
    """Shut down the connections of this process to other ranks that C++ code has opened, but those to the store.

    `ends` are both ends of the connections of all ranks.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    other_ends = {(remote, local) for local, remote in ends}
    ports = {f"{getattr(store, 'port', 0):04X}"}
    for local, remote, fd in _sockets():
        if not remote or ports & {local[-4:], remote[-4:]}:
            continue
        if other_ends.isdisjoint({(local, remote), ("", remote)}):
            continue
        with contextlib.suppress(OSError):
            if os.get_inheritable(fd):  # Python makes its own not inheritable (PEP 446), as Gloo does not
                with socket.socket(fileno=os.dup(fd)) as copy:
                    copy.shutdown(socket.SHUT_RDWR)
