"""Training that continues from its last checkpoint wherever torchrun starts it again, on as many ranks as there are.

Of the ranks that are started first the last one is lost before a step: it is killed, or waits until its host is.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

import gradmesh as gm

STEPS, LOST_AT = 8, 3


def train(folder: Path, lost: str) -> None:
    """Train, and leave in a folder where each start began, what ranks raised, and the weight."""
    gm.init(timeout=20)
    axis = gm.axis()
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not (folder / "checkpoint").exists()
    torch.manual_seed(0)
    rows, wanted = torch.randn(12, 4, dtype=torch.float64), torch.randn(12, dtype=torch.float64)
    own = torch.arange(12) % axis.size == axis.rank
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    begin = 0
    if (folder / "checkpoint").exists():
        saved = torch.load(folder / "checkpoint")
        begin = saved["step"]
        optimizer.load_state_dict(saved["optimizer"])
        with torch.no_grad():
            weight.copy_(saved["weight"])
    if axis.rank == 0:
        with (folder / "begins").open("a") as log:
            log.write(f"{begin} {axis.size}\n")
    for step in range(begin, STEPS):
        if lost == "rank":
            from tools.fault_ranks import opened_in_dev_shm

            with (folder / "opened").open("a") as log:
                log.writelines(f"{name}\n" for name in opened_in_dev_shm())
        if first and step == LOST_AT and axis.rank == axis.size - 1:
            if lost == "rank":
                os.kill(os.getpid(), signal.SIGKILL)
            (folder / "waits").touch()
            time.sleep(600)
        since = time.monotonic()
        try:
            errors = (rows[own] @ gm.replicate(weight) - wanted[own]).square().sum()
            (gm.all_reduce(errors, dst=gm.I) / 12).backward()
        except gm.GradmeshError as error:
            (folder / "error").write_text(f"{time.monotonic() - since} {error}")
            raise
        optimizer.step()
        optimizer.zero_grad()
        if axis.rank == 0:
            state = {"step": step + 1, "weight": weight.data, "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "partial")
            os.replace(folder / "partial", folder / "checkpoint")
        gm.barrier()
    if axis.rank == 0:
        torch.save(weight.data, folder / "weight")


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
