"""The library's own calls as arithmetic on the ranks' tensors: each op as it is, on a wire that autograd follows.

All motions of a transport come down to `exchange`, which here is a concatenation of slices of the other ranks' tensors.
So the gradient is what autograd makes of the forward, and nothing of the ops' own adjoints is believed.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from gradmesh.checker.recording.tape import Verb
from gradmesh.ops.traced import Encoded, decoded_on
from gradmesh.runtime.mesh import Axis
from gradmesh.transport import Transport

__all__ = ["results_of_verb"]


class _Table:
    """Where the ranks of a call lay down what they give to each, and take what they get from each."""

    def __init__(self, size: int) -> None:
        self._there = threading.Barrier(size)
        self._given: list[Sequence[Tensor]] = [()] * size
        self.end = self._there.abort

    def exchanged(self, rank: int, parts: Sequence[Tensor]) -> list[Tensor]:
        self._given[rank] = parts
        self._there.wait()
        got = [given[rank] for given in self._given]
        self._there.wait()
        return got


class _Arithmetic(Transport):
    """One rank's way over the table."""

    def __init__(self, axis: Axis, table: _Table) -> None:
        super().__init__(axis)
        self._table = table

    def exchange(
        self,
        flat: Tensor,
        send: Sequence[int],
        receive: Sequence[int],  # noqa: ARG002 - what comes tells it
        shape: Sequence[int] | None = None,
        *,
        even: bool = False,  # noqa: ARG002
    ) -> Tensor:
        """Take what each rank gives to this one."""
        got = torch.cat(self._table.exchanged(self.axis.rank, flat.split(list(send))))
        return got if shape is None else got.view(tuple(shape))


def results_of_verb(verbs: Sequence[Verb], ins: Sequence[Tensor]) -> list[Tensor]:
    """What each rank of a call gets.

    Args:
        verbs: of each rank; of one alone where nothing is sent.
        ins: what each rank handed in.
    """
    table = _Table(len(verbs))

    def run(verb: Verb, x: Tensor) -> Tensor:
        try:
            op = decoded_on(Encoded(verb.words, verb.numbers, verb.tensors, ""), verb.rank, verb.size, None)
            with torch.enable_grad():
                return op.transfer(x, _Arithmetic(op.axis, table))
        except BaseException:
            table.end()
            raise

    if len(verbs) == 1:
        return [run(verbs[0], ins[0])]
    with ThreadPoolExecutor(len(verbs)) as ranks:
        return list(ranks.map(run, verbs, ins))
