"""The shm data path in C: the same values and bits as in Python, in any mixture of both; and how it is built."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gradmesh as gm
from gradmesh.backends.own_group import CallCheck
from gradmesh.backends.shm import data_path
from gradmesh.backends.shm.data_path import _KIND_OF_SUM, is_native
from gradmesh.backends.shm.group import ShmGroup
from gradmesh.backends.shm.shared_memory import INLINE
from tests.store_event import StoreEvent
from tools.native.__main__ import OPTIONS, build, run

ROOT = Path(__file__).parent.parent
native = pytest.mark.skipif(not is_native(), reason="the data path in C was not built")
compiled = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
W = 3

# torch 2.13 renamed it.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Run(Protocol):
    def __call__(self, fn: Callable[..., Any], *args: Any) -> list[Any]: ...


@pytest.fixture(scope="module")
def ranks() -> Iterator[Run]:
    with gm.Ranks(W, backend="shm", timeout=120) as pool:
        yield lambda fn, *args: pool.run(fn, *args)


def world() -> ShmGroup:
    group = dist.group.WORLD
    assert isinstance(group, ShmGroup)
    return group


# ---- the program that stresses it


@compiled
@pytest.mark.parametrize("name", OPTIONS)
def test_random_calls_and_delays_give_the_right_values(name: str, tmp_path: Path) -> None:
    try:
        build(tmp_path / "stress", OPTIONS[name])
    except subprocess.CalledProcessError as error:
        if "cannot find" in error.stderr:  # without the sanitizer's library
            pytest.skip(error.stderr)
        pytest.fail(error.stderr)
    for count in (2, 3):
        assert run(tmp_path / "stress", count, 2000, 5) == f"2000 calls on {count} ranks: right"


def enumerated(first: str) -> list[str]:
    """The names of the enumeration in native.c that begins with a name, in their order."""
    source = (ROOT / "src/gradmesh/backends/shm/native.c").read_text()
    found = re.search(rf"enum {{ ({first}[^}}]*) }};", source)
    assert found is not None
    return found[1].split(", ")


def test_numbers_of_calls_results_and_sums_are_those_of_the_source_in_c() -> None:
    names = [name for name in enumerated("ALL_GATHER") if name != "OPS"]
    assert [getattr(data_path, name).number for name in names] == list(range(len(names)))
    results = enumerated("DONE")
    assert results.index("FLAGS_DIFFER") == data_path._FLAGS_DIFFER
    assert results.index("LATE") == data_path._LATE
    assert len(results) == data_path._NOT_TAKEN
    assert enumerated("LAYOUT") == [f"LAYOUT = {data_path._LAYOUT}"]
    assert f"INLINE = {INLINE}" in enumerated("LINE")
    assert enumerated("KINDS") == [f"KINDS = {1 + max(_KIND_OF_SUM.values())}"]


# ---- both paths, mixed at random on each rank


def mixed(seed: int, calls: int) -> list[str]:
    """Random calls, each on every rank in C or in Python as that rank draws it; those with another value than dense."""
    group, rank, size = world(), dist.get_rank(), dist.get_world_size()
    memory = group._memory
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    sizes = [0, 1, 5, 6, 7, 12, 13, 1000, 21_845, 21_846, 65_536, 131_072, 262_144, 262_145]
    wrong = []
    try:
        for number in range(calls):
            count, dtype = shared.choice(sizes), shared.choice([torch.float64, torch.float32, torch.int16])
            root, op, flags = shared.randrange(size), shared.randrange(8), own.randrange(2)
            values = torch.Generator().manual_seed(shared.randrange(1 << 30))
            full = torch.randint(-1000, 1000, (size, size * count), generator=values).to(dtype)
            table = [
                [shared.choice([0, min(1, count // size), count // size]) for _ in range(size)]
                for _ in range(size)
            ]
            group._memory = memory if own.randrange(2) else None
            check = CallCheck(7, str, lambda said: AssertionError(said), flags)
            part = full[rank, :count].clone()
            out = torch.zeros(count, dtype=dtype)
            if op == 0:
                out = torch.zeros(size * count, dtype=dtype)
                group.all_gather_flat(out, part, check)
                expected = full[:, :count].reshape(-1)
            elif op == 1:
                group.all_reduce_flat(out, part, check)
                expected = sum_in_order(full[:, :count])
            elif op == 2:
                group.reduce_scatter_flat(out, full[rank].clone(), check)
                expected = sum_in_order(full.view(size, size, count)[:, rank])
            elif op == 3:
                group.broadcast_flat(out, part, root, check)
                expected = full[root, :count]
            elif op == 4:
                out = torch.zeros(size * count, dtype=dtype)
                group.exchange_flat(out, full[rank].clone(), call_check=check)
                expected = full.view(size, size, count)[:, rank].reshape(-1)
            elif op == 5:
                out = torch.zeros(sum(row[rank] for row in table), dtype=dtype)
                send, receive = table[rank], [row[rank] for row in table]
                group.exchange_flat(out, full[rank, : sum(send)].clone(), send, receive, check)
                pieces = [full[r, : sum(table[r])].split(table[r])[rank] for r in range(size)]
                expected = torch.cat(pieces)
            elif op == 6:
                group.relay_flat(out[: 0 if rank == 0 else count], part[: 0 if rank == size - 1 else count],
                                 rank - 1 if rank else None, check)  # fmt: skip
                expected = full[rank - 1, :count] if rank else torch.zeros(count, dtype=dtype)
            else:
                dist.all_reduce(part)
                out, expected = part, sum_in_order(full[:, :count])
            if not torch.equal(out, expected):
                wrong.append(f"call {number}, operation {op}, {count} elements of {dtype}")
    finally:
        group._memory = memory
    return wrong


def sum_in_order(rows: Tensor) -> Tensor:
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total = total + row
    return total


@native
def test_ranks_may_take_either_path_in_each_call(ranks: Run) -> None:
    for seed in range(3):
        assert ranks(mixed, seed, 60) == [[]] * W


@native
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ranks_may_take_either_path_in_many_calls(ranks: Run) -> None:
    for seed in range(100, 400):
        assert ranks(mixed, seed, 200) == [[]] * W


def bits_of_sums(dtype: torch.dtype) -> list[tuple[int, bool]]:
    """Whether sums of arbitrary bits are the same in C and in Python, for several sizes."""
    group, memory = world(), world()._memory
    generator = torch.Generator().manual_seed(dist.get_rank())
    same = []
    for count in (1, 3, 64, 513, 2000):
        raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
        given = (raw & 1).view(dtype) if dtype is torch.bool else raw.view(dtype)
        results = []
        for path in (memory, None):
            group._memory = path
            out = torch.empty_like(given)
            group.all_reduce_flat(out, given)
            if dtype.is_floating_point or dtype.is_complex:
                out = torch.view_as_real(out) if dtype.is_complex else out
                out[out.isnan()] = float("nan")  # which of several is not the same on all processors
            results.append(out.view(torch.uint8))
        group._memory = memory
        same.append((count, torch.equal(*results)))
    return same


@native
@pytest.mark.parametrize("dtype", _KIND_OF_SUM, ids=str)
def test_sums_of_arbitrary_bits_are_those_of_torch(dtype: torch.dtype, ranks: Run) -> None:
    for same in ranks(bits_of_sums, dtype):
        assert all(equal for _, equal in same), same


# ---- what C does not see


def versions() -> list[int]:
    tensor, part = torch.ones(4), torch.ones(4, requires_grad=True)
    seen = [tensor._version]
    for call in (lambda: dist.all_reduce(tensor), lambda: dist.broadcast(tensor, 0)):
        call()
        seen.append(tensor._version)
    dist.broadcast(part.detach(), 0)
    seen.append(part._version)
    return seen


def test_a_tensor_that_a_call_writes_is_known_to_have_changed(ranks: Run) -> None:
    for rank, seen in enumerate(ranks(versions)):
        assert seen[0] < seen[1]
        assert rank == 0 or seen[1] < seen[2]
        assert rank == 0 or seen[3] > 0


def test_zeros_without_memory_are_sent(ranks: Run) -> None:
    def work() -> Tensor:
        out = torch.ones(W * 3)
        world().all_gather_flat(out, torch._efficientzerotensor((3,)))
        return out

    assert all(torch.equal(out, torch.zeros(W * 3)) for out in ranks(work))


def backward_after_a_broadcast() -> Tensor:
    w, t = torch.ones(4, requires_grad=True), torch.ones(4)
    y = (w * t).sum()
    dist.broadcast(t, 0)
    if dist.get_rank() == 0:
        y.backward()
        assert w.grad is not None
        return w.grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    return torch.ones(4)


def test_only_what_a_broadcast_writes_has_changed(ranks: Run) -> None:
    assert all(torch.equal(found, torch.ones(4)) for found in ranks(backward_after_a_broadcast))


@pytest.mark.parametrize(
    ("count", "dtype"), [(3, torch.float32), (3000, torch.half), (400_000, torch.float32)]
)
def test_inference_tensors_are_written_outside_of_the_mode(
    count: int, dtype: torch.dtype, ranks: Run
) -> None:
    def work() -> list[bool]:
        with torch.inference_mode():
            x, whole = torch.ones(count, dtype=dtype), torch.empty(W * count, dtype=dtype)
        dist.all_reduce(x)
        all_gather_single(whole, x)
        return [bool((each == W).all()) for each in (x, whole)]

    assert ranks(work) == [[True, True]] * W


def test_small_halves_are_summed_where_denormal_numbers_are_flushed(ranks: Run) -> None:
    def work() -> Tensor:
        torch.set_flush_denormal(True)
        try:
            x = torch.full((8,), 1e-5, dtype=torch.half)
            dist.all_reduce(x)
            return x
        finally:
            torch.set_flush_denormal(False)

    one = torch.tensor(1e-5, dtype=torch.half)
    assert all(torch.equal(found, ((one + one) + one).expand(8)) for found in ranks(work))


def test_a_root_that_is_none_is_an_error_and_no_crash() -> None:
    def work() -> str:
        try:
            dist.broadcast(torch.ones(100), group_src=7)
        except Exception as error:
            return type(error).__name__
        return "none"

    with gm.Ranks(2, backend="shm") as pool:
        assert "none" not in pool.run(work)


class _StoppedError(Exception):
    pass


def interrupted(ended: StoreEvent) -> list[str]:
    """Rank 0 is interrupted by a signal while it waits for rank 1; how further calls of both end."""
    world: Any = dist.group.WORLD

    def stop(*_: object) -> None:
        raise _StoppedError

    def send_signal(calls_before: int, deadline: float) -> None:
        while world._get_sequence_number_for_group() == calls_before and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # from the count to where the call waits
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    x, ends = torch.tensor([1.0]), []
    if dist.get_rank() == 0:
        before = signal.signal(signal.SIGALRM, stop)
        args = world._get_sequence_number_for_group(), time.monotonic() + 30
        sends = threading.Thread(target=send_signal, args=args)
        sends.start()
        try:
            with pytest.raises(_StoppedError):
                dist.all_reduce(x)
            sends.join()
        finally:
            signal.signal(signal.SIGALRM, before)
        ended.set()
    else:
        ended.wait()
    for _ in range(2):
        try:
            dist.all_reduce(x)
            ends.append(str(x.item()))
        except gm.GradmeshError as error:
            ends.append(type(error).__name__)
    return ends


def test_an_interrupted_call_aborts_the_group_on_every_rank() -> None:
    with gm.Ranks(2, backend="shm", timeout=60) as pool:
        first, second = pool.run(interrupted, StoreEvent())
    assert first == ["AbortedError"] * 2
    # The first one may find what rank 0 had written before.
    assert second[0] in ("AbortedError", "2.0")
    assert second[1] == "AbortedError"


# ---- with and without


def files_of_a_small_call() -> tuple[int, int]:
    """How many files of gradmesh an all_gather of 8 bytes runs code of, in its forward and in its backward."""
    x, seen = torch.ones(2, requires_grad=True), set[str]()
    place = str(Path(gm.__file__).parent)

    def entered(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(place):
            seen.add(frame.f_code.co_filename)

    def files(work: Callable[[], Any]) -> tuple[int, Any]:
        seen.clear()
        sys.setprofile(entered)
        try:
            result = work()
        finally:
            sys.setprofile(None)
        return len(seen), result

    cotangent = torch.ones(2 * dist.get_world_size())
    torch.autograd.grad(gm.all_gather(x, dist.group.WORLD), x, cotangent)
    forward, y = files(lambda: gm.all_gather(x, dist.group.WORLD))
    return forward, files(lambda: torch.autograd.grad(y, x, cotangent))[0]


@native
def test_a_small_call_runs_the_code_of_few_files(ranks: Run) -> None:
    assert all(forward <= 12 and backward <= 8 for forward, backward in ranks(files_of_a_small_call))


def test_environment_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMESH_SHM_NATIVE", "0")
    with gm.Ranks(2, backend="shm") as pool:
        assert pool.run(lambda: world()._memory is None) == [True, True]


@native
def test_ranks_of_a_group_may_differ_in_it() -> None:
    def work() -> float:
        x = torch.tensor([1.0 + gm.rank()], requires_grad=True)
        for _ in range(5):
            total = gm.all_reduce(x, dst=gm.R).sum() + gm.all_gather(x).square().sum()
        return float(total) + float(torch.autograd.grad(total, x)[0])

    def without() -> None:
        if dist.get_rank() == 1:
            world()._memory = None

    with gm.Ranks(2, backend="shm") as pool:
        expected = pool.run(work)
        pool.run(without)
        assert pool.run(work) == expected


def built(folder: Path, **environment: str) -> tuple[str, str, str]:
    """The name of a wheel that is built in this environment, its libraries, and what the build said."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    libraries = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    return wheel.name, " ".join(libraries), done.stdout + done.stderr


@compiled
def test_wheel_of_a_machine_with_a_compiler_is_for_every_python(tmp_path: Path) -> None:
    name, libraries, _ = built(tmp_path)
    assert "-cp311-abi3-linux_" in name
    assert libraries == "gradmesh/backends/shm/_native.abi3.so"


@pytest.mark.parametrize(
    "environment", [{"CC": "cc-that-fails"}, {"GRADMESH_NATIVE": "0"}], ids=["no compiler", "not wanted"]
)
def test_wheel_without_a_compiler_is_pure_python(environment: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "bin" / "cc-that-fails"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    environment = environment | {"PATH": f"{broken.parent}:{os.environ['PATH']}"}
    name, libraries, said = built(tmp_path / "wheel", **environment)
    assert name.endswith("-py3-none-any.whl")
    assert not libraries
    assert "without its data path in C" in said
