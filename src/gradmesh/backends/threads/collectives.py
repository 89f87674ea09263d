"""The collectives, as functions of the tensors of all ranks.

Pieces are moved between ranks, summed on their target rank, or tensors are summed on every rank. Contributions are
processed in rank order, so that sums are bitwise reproducible. `Contribution.pieces` lists the tensors that a rank
sends and receives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from gradmesh.backends.reductions import REDUCTIONS, averaged
from gradmesh.backends.threads.rendezvous import Contribution, Misfit

__all__ = ["Exchange", "exchange", "reduce", "reduce_scatter", "relay", "write"]

Pieces = Sequence[torch.Tensor | None]


@dataclasses.dataclass(slots=True)
class Exchange:
    """The pieces that a rank sends to and receives from each rank; None: nothing."""

    give: Pieces
    take: Pieces


def _fit(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype


def write(output: torch.Tensor, value: torch.Tensor) -> None:
    """Write a value into a user's tensor, for any layout and mode."""
    if output.layout is torch.sparse_coo:
        output.copy_(value.coalesce())  # without detach(), which would not change the original
        return
    # detach, since autograd forbids writing to some views
    output = output.detach()
    if output.is_inference() and not torch.is_inference_mode_enabled():
        with torch.inference_mode():
            output.copy_(value)
    else:
        output.copy_(value)


def exchange(parts: list[Contribution]) -> None:
    """Move every piece to its target rank: implements gather, scatter, broadcast and all_to_all."""
    rounds = {len(part.pieces) for part in parts}  # type: ignore[arg-type]
    if len(rounds) > 1:
        raise Misfit("the ranks passed different numbers of tensors")
    for batch in zip(*(part.pieces for part in parts), strict=True):
        moves = [
            (source, target, batch[source].give[target], batch[target].take[source])
            for target in range(len(parts))
            for source in range(len(parts))
        ]
        # Compare everything before writing anything.
        for source, target, given, taken in moves:
            if not _fit(given, taken):
                raise Misfit(
                    f"group rank {source} sends {_show(given)} to group rank {target}, which expects {_show(taken)}"
                )
        for _, _, given, taken in moves:
            if taken is not None and given is not taken:
                write(taken, given)


def reduce(parts: list[Contribution], *, op: str, root: int | None) -> None:
    """Reduce the inputs over the ranks into the outputs of the root or of all ranks; outputs may be the inputs."""
    tensors = [part.inputs for part in parts]
    _same(tensors)
    targets = parts if root is None else parts[root : root + 1]
    for part in targets:
        if not all(map(_fit, part.inputs, part.outputs)):
            raise Misfit("the output of a rank has a different shape or dtype than the sum")
    for number, of_ranks in enumerate(zip(*tensors, strict=True)):
        value = _reduced(op, list(of_ranks))
        for part in targets:
            write(part.outputs[number], value)


def relay(parts: list[Contribution]) -> None:
    """Copy to each rank the tensor of the rank that its `pieces` name, if any."""
    moves = [(part.outputs[0], parts[part.pieces].inputs[0]) for part in parts if part.pieces is not None]  # type: ignore[call-overload]
    if len({part.inputs[0].dtype for part in parts}) > 1 or not all(_fit(*move) for move in moves):
        raise Misfit("the tensor of a sender and of its receiver differ in shape or dtype")
    for out, given in moves:
        write(out, given)


def reduce_scatter(parts: list[Contribution], *, op: str) -> None:
    """Reduce the pieces for each rank into its output."""
    for number in range(len(parts[0].pieces)):  # type: ignore[arg-type]
        given = [part.pieces[number].give for part in parts]  # type: ignore[index]
        _same(given)
        values = []
        for target, part in enumerate(parts):
            if not _fit(given[0][target], part.outputs[number]):
                raise Misfit("the output of a rank has a different shape or dtype than the pieces for it")
            values.append(_reduced(op, [give[target] for give in given]))
        for part, value in zip(parts, values, strict=True):
            write(part.outputs[number], value)


def _same(of_ranks: Sequence[Sequence[torch.Tensor]]) -> None:
    if len({len(tensors) for tensors in of_ranks}) > 1:
        raise Misfit("the ranks passed different numbers of tensors")
    for tensors in zip(*of_ranks, strict=True):
        if not all(_fit(tensors[0], tensor) for tensor in tensors):
            raise Misfit("the ranks passed tensors of different shapes or dtypes")


def _reduced(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    total = functools.reduce(REDUCTIONS[op], tensors)
    if op != "AVG":
        return total
    return averaged(total.clone() if len(tensors) == 1 else total, len(tensors))


def _show(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
