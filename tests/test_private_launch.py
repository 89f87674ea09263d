"""Security: nothing of a local launch listens beyond loopback, and shm maps only a group's own memory."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradmesh as gm
from gradmesh.backends.shm import shared_memory
from gradmesh.backends.shm.shared_memory import TOKEN, Segment, chunk_bytes, segment_bytes
from gradmesh.errors import AbortedError, NotInitializedError
from gradmesh.launch.process_ranks import PrivateStore, held_port, join

# ---- what listens


def listening(pid: int | str = "self") -> list[str]:
    """The addresses on which a process listens, TCP of both kinds, as `address:port`."""
    inodes = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{fd}")
        except OSError:
            continue
        if link.startswith("socket:["):
            inodes.add(link[8:-1])
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        path = Path(f"/proc/{pid}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                raw, port = fields[1].split(":")
                words = [int(raw[i : i + 8], 16).to_bytes(4, "little") for i in range(0, len(raw), 8)]
                found.append(f"{socket.inet_ntop(family, b''.join(words))}:{int(port, 16)}")
    return found


def of_this_rank() -> list[str]:
    dist.new_group([0, 1])
    gm.all_reduce(torch.ones(3), dst=gm.I)
    return listening()


def test_a_socket_that_listens_is_seen_with_its_address() -> None:
    with socket.socket() as narrow, socket.socket() as wide, socket.socket(socket.AF_INET) as idle:
        idle.bind(("127.0.0.1", 0))
        before = set(listening())
        for each, address in ((narrow, "127.0.0.1"), (wide, "0.0.0.0")):
            each.bind((address, 0))
            each.listen()
        ports = {narrow.getsockname()[1]: "127.0.0.1", wide.getsockname()[1]: "0.0.0.0"}
        assert set(listening()) - before == {f"{address}:{port}" for port, address in ports.items()}


@pytest.mark.processes
def test_nothing_of_a_launch_on_shm_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    before = listening()
    with gm.Ranks(2, backend="shm", timeout=120) as ranks:
        assert ranks.run(of_this_rank) == [[], []]
        assert listening() == before


@pytest.mark.processes
def test_a_launch_on_gloo_listens_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")  # of a job across hosts, which this launch is not
    before = listening()
    with gm.Ranks(2, backend="gloo", timeout=120) as ranks:
        rows = ranks.run(of_this_rank)
        assert listening() == before
    assert all(rows)
    assert {address.rpartition(":")[0] for row in rows for address in row} <= {"127.0.0.1", "::1"}


def test_a_world_of_one_listens_nowhere() -> None:
    code = "import gradmesh as gm; gm.init(); from tests.test_private_launch import listening; print(listening())"
    assert gm.launch(_in_a_process, 1, backend="shm", args=(code,)) == ["[]\n"]


def _in_a_process(code: str) -> str:
    import subprocess
    import sys

    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout


# ---- the store of a launch


def test_the_store_of_a_launch_has_no_name_and_is_gone_with_its_descriptors() -> None:
    store = PrivateStore()
    (fd,) = store.descriptors
    about = os.fstat(fd)
    assert (about.st_nlink, about.st_uid, about.st_mode & 0o777) == (0, os.geteuid(), 0o600)
    first, second = join(store.path, 2), join(store.path, 2)
    first.set("a", "1")
    assert second.get("a") == b"1"
    store.close()
    store.close()
    assert not os.path.exists(store.path)


def test_without_files_in_memory_the_store_lies_in_a_folder_that_only_its_owner_enters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = PrivateStore()
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    join(store.path, 1).set("a", "1")
    store.close()
    assert not list(tmp_path.iterdir())


# ---- a store that lies


@pytest.fixture
def store() -> Iterator[Any]:
    """A TCP store that listens on loopback alone."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
            timeout=datetime.timedelta(seconds=10),
        )


TOKEN_OF_IT = secrets.token_bytes(TOKEN)
SIZE = segment_bytes(2, chunk_bytes())


def in_a_folder(folder: Path) -> int:
    path = folder / "precious"
    path.write_bytes(TOKEN_OF_IT + bytes(SIZE - TOKEN))
    return os.open(path, os.O_RDWR)


def without_a_name(folder: Path) -> int:
    fd = in_a_folder(folder)
    (folder / "precious").unlink()
    return fd


def memory_file(name: str, *, size: int = SIZE, mode: int = 0o600) -> int:
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.fchmod(fd, mode)
    os.ftruncate(fd, size)
    os.pwrite(fd, TOKEN_OF_IT, 0)
    return fd


LIES: dict[str, tuple[Callable[[Path], int], str]] = {
    "a file": (in_a_folder, "precious"),
    "a deleted file": (without_a_name, "precious"),
    "a pipe": (lambda _: os.pipe()[1], "pipe"),
    "a device": (lambda _: os.open("/dev/zero", os.O_RDWR), "/dev/zero"),
    "another program's file in memory": (lambda _: memory_file("other"), "other"),
    "one that others may open": (lambda _: memory_file("gradmesh", mode=0o644), "644"),
    "one of another size": (lambda _: memory_file("gradmesh", size=4096), "4096 bytes"),
    "one whose size may change": (lambda _: memory_file("gradmesh"), "not sealed"),
    "another group's": (lambda _: shared_memory.create(SIZE, bytes(TOKEN)), "token differs"),
}


def claim_of_rank_0(**changed: object) -> dict[str, object]:
    own = {"host": shared_memory._host(), "pid": os.getpid(), "fd": -1, "token": TOKEN_OF_IT.hex()}
    return {**own, "chunk": chunk_bytes(), **changed}


def meet(store: Any, said: object) -> Segment:
    """Be rank 1 of two, with these words of rank 0 in the store."""
    store.set("0,1/1/0", json.dumps(said))
    return Segment(store, 1, 2, [0, 1], 5.0, "it")


@pytest.mark.parametrize("lie", LIES)
def test_a_store_that_names_anything_but_the_groups_memory_is_refused(
    lie: str, store: Any, tmp_path: Path
) -> None:
    make, word = LIES[lie]
    fd = make(tmp_path)
    try:
        gc.collect()
        before = os.listdir("/proc/self/fd")
        content = os.pread(fd, SIZE, 0) if lie not in ("a pipe", "a device") else b""
        with pytest.raises(AbortedError, match="handshake with rank 0 failed verification") as caught:
            meet(store, claim_of_rank_0(fd=fd))
        assert word in str(caught.value)
        assert "remedy" in str(caught.value)
        assert caught.value.rank == 0
        if content:
            assert os.pread(fd, SIZE + 1, 0) == content
        # Fewer, where the collector has freed what other tests left.
        assert len(os.listdir("/proc/self/fd")) <= len(before)
        maps = Path("/proc/self/maps").read_text()
        assert "precious" not in maps
        assert "/memfd:other" not in maps
    finally:
        os.close(fd)


def test_a_file_of_another_user_is_refused(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = shared_memory.create(SIZE, TOKEN_OF_IT)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(AbortedError, match="belongs to user"):
        meet(store, claim_of_rank_0(fd=fd))
    os.close(fd)


def test_memory_of_the_group_is_mapped(store: Any) -> None:
    """The same words, when they are so: what the tests above refuse is refused for its lie."""
    fd = shared_memory.create(SIZE, TOKEN_OF_IT)
    segment = meet(store, claim_of_rank_0(fd=fd))
    assert segment.mapped.tolist() == [0, 1]
    segment.counts[0][0] = 1234567890123
    assert (1234567890123).to_bytes(8, "little") in os.pread(fd, 4096, 0)
    segment.close()
    os.close(fd)


@pytest.mark.parametrize(
    "said",
    [
        [],
        {},
        7,
        claim_of_rank_0(pid="1; rm"),
        claim_of_rank_0(pid=-1),
        claim_of_rank_0(fd="../../../etc/passwd"),
        claim_of_rank_0(chunk=12345),
        claim_of_rank_0(chunk=1 << 60),
        claim_of_rank_0(token="00"),
        claim_of_rank_0(host=["a"]),
    ],
)
def test_invalid_store_entries_raise(said: object, store: Any) -> None:
    with pytest.raises(AbortedError, match="handshake with rank 0 failed verification"):
        meet(store, said)


# ---- no memory


@pytest.mark.processes
def test_missing_group_memory_raises_on_every_rank_and_the_world_continues() -> None:
    def no_room(where: int) -> tuple[str, str, float]:
        import resource

        limit = resource.RLIMIT_FSIZE if where == 0 else resource.RLIMIT_AS
        before = resource.getrlimit(limit)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        try:
            if dist.get_rank() == where:
                resource.setrlimit(limit, (1 << 16 if where == 0 else used + (1 << 16), before[1]))
            dist.new_group(backend="shm", timeout=datetime.timedelta(seconds=60))
        except Exception as error:
            return type(error).__name__, str(error), 0.0
        finally:
            resource.setrlimit(limit, before)
        return "none", "", 0.0

    with gm.Ranks(3, backend="shm", timeout=120) as ranks:
        for where in (0, 2):
            for rank, (kind, text, _) in enumerate(ranks.run(no_room, where)):
                if rank == where:
                    assert kind == NotInitializedError.__name__, text
                    assert "not enough shared memory for the group" in text
                elif kind != "none":  # a rank that has mapped the memory is notified at its first call
                    assert kind == "AbortedError", text
                    assert f"rank {where}" in text
                else:
                    assert (where, rank) == (2, 1)


def test_a_port_is_given_to_no_one_else_and_a_store_may_listen_at_it() -> None:
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(held_port()) for _ in range(500)]
        others = [stack.enter_context(contextlib.closing(socket.create_server(("", 0)))) for _ in range(300)]
        assert len({*ports, *(each.getsockname()[1] for each in others)}) == 800
        store = dist.TCPStore("127.0.0.1", ports[0], 1, is_master=True)  # type: ignore[attr-defined]
        store.set("key", "value")
        assert dist.TCPStore("localhost", ports[0], 1, is_master=False).get("key") == b"value"  # type: ignore[attr-defined]
