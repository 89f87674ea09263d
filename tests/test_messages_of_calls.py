"""What a call sends over a process group of torch, and the hosts of the tests."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import gradmesh as gm
from benchmarks import hosts as hosts_benchmark
from gradmesh.ops.base import Op
from gradmesh.transport import process_group
from gradmesh.transport.call_checks import calls_of
from gradmesh.transport.process_group import TorchGroup, direct, gathered, inline
from tools.hosts import Hosts, why_not

Ranks = Callable[[int], Callable[..., list[Any]]]

VERBS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all_gather": gm.all_gather,
    "all_reduce": lambda x: gm.all_reduce(x, dst=gm.R),
    "all_to_all": gm.all_to_all,
    "broadcast": lambda x: gm.broadcast(x, root=1),
    "reduce_scatter": gm.reduce_scatter,
    "shift": gm.shift,
}
SENT = (
    "all_to_all_single",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce",
)


def _kept_ops() -> dict[str, int]:
    """How many ops are left after calls of a verb and their backward, without the garbage collector."""
    rows = {1 - gm.rank(): torch.tensor([0, 1])}
    verbs = VERBS | {
        "mean": lambda x: gm.all_reduce(x, op="mean", dst=gm.R),
        "neighbor_all_to_all": lambda x: gm.neighbor_all_to_all(
            x, send_rows=rows, receive_counts=dict.fromkeys(rows, 2)
        ),
    }
    found = {}
    for name, verb in verbs.items():
        x = torch.full((4,), 1.0 + gm.rank(), requires_grad=True)
        gc.collect()
        before = _ops()
        gc.disable()
        try:
            for _ in range(3):
                y = verb(x)
                torch.autograd.grad(y, x, torch.full_like(y, 2.0 + gm.rank()))
            del y
            found[name] = _ops() - before
        finally:
            gc.enable()
    return found


def _ops() -> int:
    return sum(issubclass(type(each), Op) for each in gc.get_objects())


def test_the_ops_of_a_group_that_keeps_none_are_freed_with_their_calls(worlds: Any) -> None:
    for found in worlds(2, "gloo").run(_kept_ops):
        assert found == dict.fromkeys([*VERBS, "mean", "neighbor_all_to_all"], 0)


def _messages(level: Literal[0, 1], size: int) -> dict[str, tuple[int, int]]:
    """How many exchanges between all ranks a verb makes, forward and backward."""
    found = {}
    for name, verb in VERBS.items():
        x = torch.full((size,), 1.0 + gm.rank(), requires_grad=True)
        calls: Counter[str] = Counter()
        with gm.check(level), _counted(calls):
            y = verb(x)
            forward = calls.total()
            torch.autograd.grad(y, x, torch.full_like(y, 2.0 + gm.rank()))
        found[name] = forward, calls.total() - forward
    return found


def _counted(calls: Counter[str]) -> Any:
    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return call(*args, **options)

        return counted

    names = {name: getattr(dist, name) for name in SENT if hasattr(dist, name)}
    changed = contextlib.ExitStack()
    for name, call in names.items():
        changed.enter_context(patch.object(dist, name, counting(name, call)))
    for name in ("_post", "_all_to_all"):
        changed.enter_context(patch.object(TorchGroup, name, counting(name, getattr(TorchGroup, name))))
    return changed


def _gloo(worlds: Any) -> Callable[..., list[Any]]:
    return worlds(2, "gloo", 240).run


def test_the_check_of_a_short_call_costs_no_message(worlds: Any) -> None:
    for size in (4, direct(2) // 4):
        found, _ = _gloo(worlds)(_messages, 1, size)
        assert found == dict.fromkeys(VERBS, (1, 1))


def test_the_check_of_a_long_call_costs_one_message(worlds: Any) -> None:
    for size in (inline(2), 3 << 18):
        checked, unchecked = (_gloo(worlds)(_messages, level, size)[0] for level in (1, 0))
        assert checked == {verb: (f + 1, b + 1) for verb, (f, b) in unchecked.items()}


def _values(sizes: list[int]) -> None:
    rank, size = gm.rank(), gm.axis().size
    for n in sizes:
        for dtype in (torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.float8_e4m3fn):
            x = (torch.arange(n) % 3 + rank).to(dtype)
            own, summed = torch.arange(n) % 3, torch.arange(n) % 3 * size + sum(range(size))
            assert gm.all_gather(x).equal(torch.cat([(own + r).to(dtype) for r in range(size)]))
            assert gm.shift(x).equal((own + (rank - 1) % size).to(dtype))
            assert gm.broadcast(x, root=1, dst=gm.I).equal((own + 1).to(dtype))
            uneven = gm.all_gather(x[: max(n - rank, 0)], sizes="auto")
            assert uneven.equal(torch.cat([(own + r).to(dtype)[: max(n - r, 0)] for r in range(size)]))
            if dtype is not torch.float8_e4m3fn:
                assert gm.all_reduce(x, dst=gm.R).equal(summed.to(dtype))
                assert gm.reduce_scatter(torch.cat([x] * size)).equal(summed.to(dtype))
                at_root = summed if rank == 1 else torch.zeros_like(summed)
                assert gm.reduce(x, root=1).equal(at_root.to(dtype))


def test_values_do_not_depend_on_how_they_are_sent(worlds: Any) -> None:
    edges = [limit(3) // 8 for limit in (gathered, direct, inline)]
    worlds(3, "gloo", 240).run(_values, [0, 1, *(edge + more for edge in edges for more in (-1, 0, 1))])
    worlds(2, "gloo", 240).run(_values, [direct(2) // 8 + 1, inline(2) // 8, inline(2) // 8 + 1])


def _reduced() -> bool:
    """Whether a sum has the same bits at every level, also where more ranks than few send no messages in pairs."""
    each = [torch.randn(20_000, generator=torch.Generator().manual_seed(r)) for r in range(gm.axis().size)]
    found = [torch.stack(each).sum(0)]
    for pairs in (8, 1):
        for level in (0, 1, "deferred"):
            with gm.check(level), patch.object(process_group, "PAIRS", pairs):
                found.append(gm.reduce(each[gm.rank()], root=0))
    return gm.rank() != 0 or all(one.equal(found[0]) for one in found)


def test_a_reduce_adds_in_rank_order_at_every_level(worlds: Any) -> None:
    assert all(worlds(3, "gloo", 240).run(_reduced))


def _detailed() -> None:
    """Calls whose messages differ in number between the ranks, where torch counts them to compare collectives."""
    debugging: Any = dist
    debugging.set_debug_level(debugging.DebugLevel.DETAIL)
    try:
        group, rank = dist.new_group(backend="gloo"), float(gm.rank())
        for level in (0, 1):
            with gm.check(level):
                for n in (3, 300_000):
                    got = gm.permute(torch.full((n,), 1 + rank), group, pairs=[(0, 1)])
                    assert got.equal(torch.full((n,), float(rank == 1)))
                    assert gm.broadcast(torch.full((n,), rank), group, root=2).equal(torch.full((n,), 2.0))
                    assert gm.reduce(torch.full((n,), rank), group, root=1).sum() == 3 * n * (rank == 1)
                assert gm.all_reduce(torch.full((2,), rank), group, dst=gm.I).tolist() == [3, 3]
    finally:
        debugging.set_debug_level(debugging.DebugLevel.OFF)


def test_calls_are_right_where_torch_compares_the_collectives(worlds: Any) -> None:
    worlds(3, "gloo", 240).run(_detailed)


def _one_is_long() -> list[str]:
    """Rank 1 passes an operand that does not fit into the message that the other rank sends."""
    found = []
    for verb in VERBS.values():
        x = torch.ones(4 if gm.rank() == 0 else 4 * inline(2))
        with pytest.raises(gm.MismatchError) as caught:
            verb(x)
        found.append(str(caught.value))
    return found


def test_calls_of_a_short_and_a_long_operand_are_compared(worlds: Any) -> None:
    for text in _gloo(worlds)(_one_is_long)[0]:
        assert f"[{4 * inline(2)}]" in text


def _calls(seed: int, rounds: int, way: str) -> Counter[str]:
    """Random calls, some of which differ between the ranks; each is right, or raises on every rank."""
    kept = calls_of(gm.axis().group).first_messages
    kept.clear()  # the calls make their own, in this way
    with WAYS[way]():
        done = _random_calls(seed, rounds)
        gm.all_gather(torch.ones(1))  # whose messages are kept
    assert {each.exact for each in kept} == {way != "first messages of one length"}
    kept.clear()
    return done


WAYS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "as it is": contextlib.nullcontext,
    "first messages of one length": lambda: patch.object(TorchGroup, "_inline", lambda _: None),
    "no messages between pairs": lambda: patch.object(process_group, "PAIRS", 1),
}


def _random_calls(seed: int, rounds: int) -> Counter[str]:
    same, rank, size, done = random.Random(seed), gm.rank(), gm.axis().size, Counter[str]()
    for _ in range(rounds):
        n, dtype = (
            size * same.choice([1, 512, 4097, 9000, 70_000, 300_000]),
            same.choice([torch.uint8, torch.float64]),
        )
        odd = rank in same.choice([[same.randrange(size)], range(1, size, 2)])
        kind, name, other = same.choice(["right", "verb", "length", "counts"]), *same.sample(sorted(VERBS), 2)
        each = [torch.arange(n).remainder(11).add(r).to(dtype) for r in range(size)]
        parts = torch.stack(each).view(size, size, -1)[:, rank]
        x = each[rank]
        if kind == "right":
            expected = {
                "all_gather": torch.cat(each),
                "all_reduce": torch.stack(each).sum(0, dtype=dtype),
                "all_to_all": parts.flatten(),
                "broadcast": each[1],
                "reduce_scatter": parts.sum(0, dtype=dtype),
                "shift": each[rank - 1],
            }[name]
            assert VERBS[name](x).equal(expected), (name, n)
        elif kind == "counts":  # some ranks expect more, or less, than is sent to them
            wrong = odd * (same.choice([-1, 1]) if n > size else 1)
            count, to, source = n // size, (rank + 1) % size, (rank - 1) % size
            with pytest.raises(gm.MismatchError):
                gm.neighbor_all_to_all(
                    x,
                    send_rows={to: torch.arange(count)},
                    receive_counts={source: count + wrong},
                )
        else:
            verb = VERBS[other if kind == "verb" and odd else name]
            with pytest.raises(gm.MismatchError):
                verb(torch.cat([x, x]) if kind == "length" and odd else x)
        done[kind] += 1
    return done


LATER: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "rank 0 expects less": (lambda x: gm.all_reduce(x[:2048], dst=gm.R), gm.all_gather),
    "all expect as many bytes": (gm.all_to_all, gm.reduce_scatter),
}


def _deferred(case: str) -> str:
    """The error of a call that rank 0 makes instead of the others', while they wait."""
    calls = LATER[case]
    x = torch.arange(4096.0) + gm.rank()
    with gm.check("deferred"):
        for call in calls:
            call(x)
        with pytest.raises(gm.MismatchError) as caught:
            calls[gm.rank() > 0](x)
    return str(caught.value)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", LATER)
def test_a_mismatch_that_is_compared_later_gives_no_result(case: str, size: int) -> None:
    for text in gm.launch(_deferred, size, backend="gloo", args=(case,), timeout=120):
        assert "the ranks' calls do not match" in text


@pytest.mark.parametrize(("size", "way"), [(2, "as it is"), (4, "as it is"), *((3, way) for way in WAYS)])
def test_random_calls_after_mismatched_ones_are_right(worlds: Any, size: int, way: str) -> None:
    for done in worlds(size, "gloo", 240).run(_calls, 8 + size, 60, way):
        assert min(done[kind] for kind in ("right", "verb", "length", "counts")) > 5


TWO_VERBS = """
import torch
import gradmesh as gm

gm.init(backend="gloo", timeout=30)
x = torch.full((1 << 22,), 1.0 + gm.rank())
for _ in range(3):
    try:
        (gm.all_to_all, gm.reduce_scatter)[gm.rank() % 2](x)
        raise SystemExit("no error")
    except gm.MismatchError:
        pass  # with the error everything is freed that it refers to
    assert gm.all_to_all(torch.arange(4.0) + gm.rank()).tolist() == [gm.rank() + other for other in range(4)]
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_that_agree_in_a_mismatched_call_go_on_when_their_data_has_arrived(tmp_path: Path) -> None:
    script = tmp_path / "two_verbs.py"
    script.write_text(TWO_VERBS)
    with Hosts(4, 1) as hosts:
        hosts.wire.rate = 20_000_000
        ranks = hosts.torchrun([str(script)], stderr=subprocess.PIPE)
        deadline = time.monotonic() + 240
        for rank in ranks:  # torchrun waits for the hosts of ranks that have failed
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(max(0, deadline - time.monotonic()))
            rank.terminate()
        errors = [rank.communicate(timeout=60)[1][-4000:] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * 4, "\n".join(errors)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_packets_between_hosts_are_delayed_and_counted() -> None:
    echo = "import socket; s = socket.create_server(('', 7000)); c, _ = s.accept(); c.sendall(c.recv(100))"
    client = (
        "import socket, time\n"
        "for _ in range(500):\n"
        "    try: c = socket.create_connection(('10.77.0.1', 7000)); break\n"
        "    except OSError: time.sleep(0.01)\n"
        "start = time.monotonic(); c.sendall(b'x' * 100); c.recv(100); print(time.monotonic() - start)"
    )
    with Hosts(2, delay=50) as hosts:
        server = hosts.popen(0, [sys.executable, "-c", echo])
        process = hosts.popen(1, [sys.executable, "-c", client], stdout=subprocess.PIPE)
        out, _ = process.communicate(timeout=60)
        assert server.wait(timeout=60) == 0
        assert float(out) >= 0.1
        assert hosts.wire.payload == 200
        sleeper = hosts.popen(1, ["sleep", "100"])
        time.sleep(0.05)
        hosts.kill(1)
        assert sleeper.wait(timeout=10)
        names = hosts.names
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not [name for name in names if name in left]


def test_the_cost_model_has_the_bytes_and_nearly_the_trips_that_were_measured() -> None:
    rows = [line.split("|")[1:-1] for line in hosts_benchmark.PAGE.read_text().splitlines() if "B |" in line]
    sizes = {"4 B": 4, "64 KiB": 65536, "4 MiB": 4 << 20}
    compared = 0
    for hosts, verb, size, way, measured, *_ in ([cell.strip() for cell in row] for row in rows):
        model = hosts_benchmark.predicted(verb, way, sizes.get(size, 0), int(hosts))
        if model is None or "ms" in measured:
            continue
        trips, _, count = measured.partition(", ")
        number, unit = count.replace(",", "").split()
        assert float(number) * {"B": 1, "KiB": 1024}[unit] == pytest.approx(model["bytes"], rel=0.02)
        assert float(trips) == pytest.approx(model["trips"], abs=3.1 if size == "4 MiB" else 1.8)
        compared += 1
    assert compared > 80


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_cost_model_has_the_trips_and_bytes_of_calls_between_hosts(tmp_path: Path) -> None:
    found = tmp_path / "cells.json"
    command = ["-m", "benchmarks.hosts", "--hosts", "2", "--sizes", "4", "65536", "--rounds", "2"]
    command += ["--json", str(found), "--verbs", "all_gather", "all_reduce"]
    subprocess.run([sys.executable, *command], cwd=Path(__file__).parents[1], check=True, capture_output=True)
    cells = [cell for cell in json.loads(found.read_text()) if cell["system"] == "gradmesh"]
    assert len(cells) == 8
    for cell in cells:
        model = hosts_benchmark.predicted(cell["verb"], cell["way"], cell["size"], 2)
        assert model is not None
        assert cell["bytes"] == pytest.approx(model["bytes"], rel=0.01)
        assert cell["trips"] == pytest.approx(model["trips"], abs=1)
