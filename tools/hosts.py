"""Several hosts on one machine: network namespaces, joined by a wire that delays, slows down and counts packets.

$ sudo python -m tools.hosts --hosts 4 --delay 10 script.py ARGUMENTS     # on one rank of each host, by torchrun

Each namespace has one TUN device, and a process hands packets from one to the other after the delay. It needs Linux,
root and /dev/net/tun. In a script, `wire()` sets the delay and the rate and reads the counts while the ranks run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import itertools
import mmap
import os
import secrets
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType

__all__ = ["Hosts", "Wire", "main", "why_not", "wire"]

_VARIABLE = "GRADMESH_TEST_WIRE"
_INTERFACE = "gradmesh0"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LARGEST = 65535


def why_not() -> str | None:
    """Why there can be no hosts on this machine; None if there can."""
    if sys.platform != "linux" or os.geteuid() or not shutil.which("ip"):
        return "needs Linux, root and the command ip"
    if not Path("/dev/net/tun").exists():
        return "needs /dev/net/tun"
    return None


class Wire:
    """The shared counters of the wire, which the ranks can read and set.

    Args:
        file: the file that holds them.
    """

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._words = memoryview(mmap.mmap(opened.fileno(), 0)).cast("Q")

    @property
    def delay(self) -> float:
        """Milliseconds that a packet takes from one host to another."""
        return self._words[0] / 1000

    @delay.setter
    def delay(self, milliseconds: float) -> None:
        self._words[0] = round(milliseconds * 1000)

    @property
    def rate(self) -> int:
        """Bytes that a host can send in a second; 0: as many as this machine carries."""
        return self._words[2]

    @rate.setter
    def rate(self, bytes_per_second: int) -> None:
        self._words[2] = bytes_per_second

    @property
    def payload(self) -> int:
        """Bytes of TCP data sent between hosts so far."""
        return self._words[1]

    def add(self, payload: int) -> None:
        """Count the data of a packet."""
        self._words[1] += payload


def wire() -> Wire:
    """The wire of the hosts that this script runs on."""
    return Wire(Path(os.environ[_VARIABLE]))


class Hosts:
    """Hosts that can be reached from each other, until the block ends.

    Args:
        number: how many.
        delay: milliseconds that a packet takes; `wire.delay` changes it.
    """

    def __init__(self, number: int, delay: float = 0) -> None:
        self._id = secrets.token_hex(2)
        self.names = [f"gm{self._id}-{host}" for host in range(number)]
        self._delay = delay

    def __enter__(self) -> Hosts:
        """Make the namespaces and start the wire."""
        reason = why_not()
        if reason is not None:
            raise RuntimeError(f"no hosts on this machine: {reason}")
        with contextlib.ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="gradmesh-wire-")))
            self._file = folder / "counters"
            self._file.write_bytes(bytes(mmap.PAGESIZE))
            self.wire = Wire(self._file)
            self.wire.delay = self._delay
            devices = [self._host(host, undo) for host in range(len(self.names))]
            carrier = get_context("fork").Process(target=_carry, args=(devices, self._file), daemon=True)
            carrier.start()
            undo.callback(carrier.join)
            undo.callback(carrier.terminate)
            for device in devices:
                os.close(device)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """End all processes of the hosts, and remove them."""
        self._undo.close()

    def _host(self, host: int, undo: contextlib.ExitStack) -> int:
        name, device = self.names[host], f"gm{self._id}{host}"
        _ip("netns", "add", name)
        undo.callback(self._remove, host)
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "link", "set", device, "name", _INTERFACE, "mtu", "65000", "txqueuelen", "10000")
        _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", _INTERFACE)
        for link in ("lo", _INTERFACE):
            _ip("-n", name, "link", "set", link, "up")
        return tun

    def address(self, host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host + 1}"

    def kill(self, host: int) -> None:
        """Kill all processes of a host, as if it lost its power."""
        found = _ip("netns", "pids", self.names[host])
        for process in map(int, found.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, 9)

    def _remove(self, host: int) -> None:
        self.kill(host)
        _ip("netns", "del", self.names[host])

    def popen(self, host: int, command: Sequence[str], **options: object) -> subprocess.Popen[str]:
        """Start a command on a host; the options are those of `subprocess.Popen`."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": _INTERFACE,
            "TP_SOCKET_IFNAME": _INTERFACE,
            _VARIABLE: str(self._file),
        }
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            ["ip", "netns", "exec", self.names[host], *command], env=environment, text=True, **options
        )

    def torchrun(
        self, arguments: Sequence[str], ranks: int = 1, options: Sequence[str] = (), **popen: object
    ) -> list[subprocess.Popen[str]]:
        """Start torchrun on every host.

        Args:
            arguments: the script and its arguments.
            ranks: ranks on each host.
            options: further options of torchrun.
            popen: options of `subprocess.Popen`.
        """
        port = 20000 + secrets.randbelow(20000)
        return [
            self.popen(
                host,
                [
                    *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(self.names)}"),
                    *(f"--nproc-per-node={ranks}", f"--node-rank={host}"),
                    *(f"--master-addr={self.address(0)}", f"--master-port={port}", *options, *arguments),
                ],
                **popen,
            )
            for host in range(len(self.names))
        ]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _carry(devices: Sequence[int], file: Path) -> None:
    """Hand packets on until this process is ended."""
    counters, order = Wire(file), itertools.count()
    free = [0.0] * len(devices)  # when each host can send its next packet
    pending: list[tuple[float, int, int, bytes]] = []
    while True:
        now = time.monotonic()
        while pending and pending[0][0] <= now:
            _, _, target, packet = heapq.heappop(pending)
            with contextlib.suppress(OSError):  # the host is gone, or its queue is full: TCP sends it again
                os.write(target, packet)
        wait = max(pending[0][0] - now, 0) if pending else None
        for device in select.select(devices, [], [], wait)[0]:
            source = devices.index(device)
            for packet in _packets(device):
                target = packet[19] - 1
                if packet[0] >> 4 == 4 and target in range(len(devices)):
                    counters.add(_payload(packet))
                    free[source] = max(time.monotonic(), free[source])
                    if counters.rate:
                        free[source] += len(packet) / counters.rate
                    due = free[source] + counters.delay / 1000
                    heapq.heappush(pending, (due, next(order), devices[target], packet))


def _packets(device: int) -> Iterator[bytes]:
    """The packets that wait at a device."""
    with contextlib.suppress(BlockingIOError):
        while packet := os.read(device, _LARGEST):
            yield packet


def _payload(packet: bytes) -> int:
    """Bytes of data in a TCP packet."""
    header = 4 * (packet[0] & 15)
    return len(packet) - header - 4 * (packet[header + 12] >> 4) if packet[9] == 6 else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a script on ranks of several hosts."""
    parser = argparse.ArgumentParser(prog="python -m tools.hosts", description=__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="ranks on each host")
    parser.add_argument("--delay", type=float, default=0.0, help="milliseconds from one host to another")
    parser.add_argument("script", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    with Hosts(chosen.hosts, chosen.delay) as hosts:
        first, *others = hosts.torchrun(chosen.script, chosen.ranks)
        return max(process.wait() for process in (first, *others))


if __name__ == "__main__":
    sys.exit(main())
