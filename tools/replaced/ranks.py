"""Run the functions of one repository on several ranks, beside one process, and print what was found as JSON.

$ python -m tools.replaced.ranks NAME FOLDER BACKEND before|after [FUNCTION|SITUATION ...]

It runs in the environment of the libraries. Each case has ranks of its own, forked from this process, which are ended
when they hang.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import sys
import time
import warnings
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from tools.replaced.cases import Case, World, found, text_of, truth

HANGS, SKIPPED = "it hangs", {"absent": "not needed"}
RANKS, EVEN, SUBGROUP = 3, (2, 2, 2), (1, 2)
LIMIT, GRACE = 120.0, 5.0
_ENDED = re.compile("by peer|remote|process ended|Timed out|timed out")
SITUATIONS = ("even", "uneven", "subgroup")


def sizes_of(case: Case, situation: str) -> tuple[int, ...] | None:
    """The rows of the ranks in a situation; None where the case does not have it."""
    if situation == "uneven":
        return case.uneven
    return EVEN if situation == "even" else EVEN[: len(SUBGROUP)]


def measured(*given: Any) -> dict[str, Any]:
    """What `measure` finds; a second time if it hangs, which may be the machine's load."""
    once = measure(*given)
    return measure(*given) if HANGS in once.values() else once


def measure(
    case: Case, repository: Any, module: Any, situation: str, backend: str, after: bool
) -> dict[str, Any]:
    """The largest error over the ranks of each quantity, or why there is none."""
    sizes = sizes_of(case, situation)
    if sizes is None:
        return {"absent": "sizes do not occur"}
    if situation == "subgroup" and case.group is None:
        return {"absent": "no subgroup"}
    if situation == "subgroup" and not case.group and not after:
        return {"absent": "no argument"}
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(RANKS):
            here, there = context.Pipe(duplex=False)
            given = (there, rank, case, repository, module, situation, backend, sizes, f"{folder}/store")
            processes.append(context.Process(target=_on_rank, args=given, daemon=True))
            processes[-1].start()
            there.close()
            pipes.append(here)
        answers = _answers(pipes)
        for process in processes:
            process.kill()
            process.join()
    return together(answers)


def _answers(pipes: list[Connection]) -> list[dict[str, Any]]:
    """What each rank found; when one raised, the others have a moment."""
    answers: list[dict[str, Any]] = [{} for _ in pipes]
    until, left, order = time.monotonic() + LIMIT, dict(enumerate(pipes)), 0
    while left and (rest := until - time.monotonic()) > 0:
        for ready in wait(list(left.values()), rest):
            rank = next(rank for rank, pipe in left.items() if pipe is ready)
            try:
                answers[rank].update(pipes[rank].recv())
            except EOFError:
                answers[rank].update({"raises": "the process ended", "done": True})
            answer = answers[rank]
            if "raises" in answer or isinstance(answer.get("second"), str):
                until = min(until, time.monotonic() + GRACE)
                answer.setdefault("order", order := order + 1)
            if "done" in answer:
                del left[rank]
    return answers


def together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The answers of all ranks as one."""
    within = [
        answer for answer in answers if answer.keys() != {"done"}
    ]  # a rank outside of the group has none
    said = {key: _one(within, key) for key in ("value", "first", "second")}
    raised = [said[key] for key in ("value", "first") if isinstance(said[key], str)]
    return {"raises": raised[0]} if raised else said


def _one(answers: list[dict[str, Any]], key: str) -> float | str:
    """The largest error, or the first text: that of a rank whose peers ended comes last."""
    texts = [
        (bool(_ENDED.search(text)), answer.get("order", 0), text)
        for answer in answers
        for text in (answer.get("raises", answer.get(key, HANGS)),)
        if isinstance(text, str)
    ]
    hung = [text for text in texts if text[2] == HANGS]
    others = [text for text in texts if text[2] != HANGS]
    if others or hung:
        return min(others or hung)[2]
    return max(float(answer[key]) for answer in answers)


def _on_rank(
    pipe: Connection,
    rank: int,
    case: Case,
    repository: Any,
    module: Any,
    situation: str,
    backend: str,
    sizes: tuple[int, ...],
    store: str,
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    try:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
        import gradmesh  # noqa: F401 - registers shm

        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=RANKS,
            timeout=timedelta(seconds=LIMIT),
        )
        ranks = list(SUBGROUP) if situation == "subgroup" else list(range(RANKS))
        group: Any = dist.group.WORLD if situation != "subgroup" else dist.new_group(ranks)
        scope: Any = nullcontext()
        if situation == "subgroup" and not case.group:
            scope = _mesh_of(ranks)
        if rank in ranks:
            world = World(sizes, ranks.index(rank), group)
            if repository.prepare is not None:
                repository.prepare(module, world)
            with scope:
                for each in found(case, module, world, truth(case, world)):
                    pipe.send(each)
        elif repository.prepare is not None:
            repository.prepare(module, None)
        pipe.send({"done": True})
    except Exception as error:
        pipe.send({"raises": text_of(error), "done": True})
    time.sleep(LIMIT)  # the others may still need this rank


def _mesh_of(ranks: list[int]) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    import gradmesh as gm

    return gm.use_mesh(DeviceMesh("cpu", ranks, mesh_dim_names=("part",)))


def main() -> None:
    """Measure the cases of a repository and print them."""
    from tools.replaced.repositories import BY_NAME

    name, folder, backend, side = sys.argv[1:5]
    wanted = {tuple(each.split("|")) for each in sys.argv[5:]}
    repository = BY_NAME[name]
    warnings.simplefilter("ignore")
    module = repository.load(Path(folder))
    rows: dict[str, dict[str, Any]] = {}
    for case in repository.cases:
        for situation in SITUATIONS:
            given = (case, repository, module, situation, backend, side == "after")
            skipped = bool(wanted) and (case.name, situation) not in wanted
            rows.setdefault(case.name, {})[situation] = SKIPPED if skipped else measured(*given)
    print("\n" + json.dumps(rows))


if __name__ == "__main__":
    main()
