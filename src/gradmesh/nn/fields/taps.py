"""The input rows of a sliding kernel, for convolution and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradmesh.nn.fields.cuts import Cut, shares, window
from gradmesh.verbs.call import Call, integer

__all__ = ["Taps", "each_dim", "padded", "slid"]


@dataclass(frozen=True)
class Taps:
    """A kernel along one dim: output j takes the rows `j * stride - left + i * dilation`, i = 0 ... kernel - 1.

    Attributes:
        kernel, stride, dilation: as in `torch.nn.Conv1d`.
        left, right: the padding on either side.
        ceil: `ceil_mode` of `torch.nn.MaxPool1d`: a last window may extend beyond the padding.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    left: int = 0
    right: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """The extent of the kernel in rows."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, rows: int) -> int:
        """The number of outputs for a number of rows."""
        free = rows + self.left + self.right - self.reach
        count = max((free + (self.stride - 1) * self.ceil) // self.stride + 1, 0)
        return count - (self.ceil and (count - 1) * self.stride >= rows + self.left)

    def shares(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Each rank's number of outputs: output j is on the rank that has row min(j * stride, rows - 1)."""
        return shares(sizes, self.outputs(sum(sizes)), down=self.stride)

    def needs(self, first: int, last: int) -> tuple[int, int]:
        """The rows that the outputs `first` ... `last - 1` need, as a half-open interval."""
        begin = first * self.stride - self.left
        return (begin, begin + (last - first - 1) * self.stride + self.reach) if first < last else (0, 0)


def each_dim(value: int | Sequence[int], dims: int, least: int = 0) -> tuple[int, ...] | None:
    """One int >= `least` for each spatial dim, or None if the argument is invalid."""
    given = value if isinstance(value, Sequence) else (value,) * dims
    found = tuple(n for n in map(integer, given) if n is not None and n >= least)
    return found if len(found) == len(given) == dims else None


def slid(
    verb: str, x: Tensor, cuts: Sequence[Cut], taps: Sequence[Taps], mode: str = "zeros"
) -> tuple[Tensor, list[tuple[int, int]], list[int]]:
    """The rows that this rank's outputs need.

    Args:
        verb: the operator's name, for errors.
        x: the local rows, (n, c, ...).
        cuts: how they are sharded.
        taps: of each spatial dim.
        mode: `padding_mode` of `torch.nn.Conv1d`.

    Returns:
        The rows, including padding along sharded dims unless mode is "zeros"; the missing padding on either side of
        each spatial dim; the local number of outputs along each.
    """
    if x.dim() != len(taps) + 2 or any(cut.dim < 2 for cut in cuts):
        Call(verb, x, cuts[0].axis).fail(
            "the field has a wrong number of dims, or is not sharded along a spatial dim",
            expected=f"(n, c, rows, ...) with {len(taps) + 2} dims, sharded along dims >= 2",
            got=f"shape {list(x.shape)}, sharded along dim {', '.join(str(cut.dim) for cut in cuts)}",
            remedy="add a batch dim, x.unsqueeze(0), or pass the sharded spatial dim, e.g. dim=2",
        )
    found = {cut.dim: cut for cut in cuts}
    pads, counts = [], []
    for dim, tap in enumerate(taps, 2):
        cut = found.get(dim)
        rows = x.shape[dim] if cut is None else cut.total
        count = tap.outputs(rows)
        most = {"circular": rows, "reflect": rows - 1}.get(mode)
        if count <= 0 or not rows or (most is not None and max(tap.left, tap.right) > most):
            Call(verb, x, cuts[0].axis).fail(
                f"the field is too small for the kernel along dim {dim}",
                expected=f"at least {tap.reach} rows including padding; padding of at most the number of rows with "
                "padding_mode='circular', and one less with 'reflect'",
                got=f"{rows} rows over all ranks, padding {tap.left} and {tap.right}, padding_mode={mode!r}",
                remedy="use a smaller kernel or more padding"
                if count <= 0 or not rows
                else "use less padding",
            )
        if cut is None:
            counts.append(count)
            pads.append((tap.left, max(tap.right, tap.needs(0, count)[1] - rows)))
            continue
        each, needs, begin = tap.shares(cut.sizes), [], 0
        for share in each:
            needs.append(tap.needs(begin, begin + share))
            begin += share
        counts.append(each[cut.axis.rank])
        if mode in ("reflect", "replicate"):
            x, missing = _continued(x, cut, needs, mode), (0, 0)
        else:
            x, missing = window(x, cut, needs, mode == "circular")
        pads.append(missing)
    return x, pads, counts


def _continued(x: Tensor, cut: Cut, needs: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """The rows that this rank needs; rows beyond the field's ends are copies of rows inside."""
    last = cut.total - 1

    def inside(place: int) -> int:
        return last - abs(last - abs(place)) if mode == "reflect" else min(max(place, 0), last)

    def sources(begin: int, end: int) -> tuple[int, int]:
        # The map is monotone between the field's ends.
        found = [inside(place) for place in (begin, end - 1, 0, last) if begin <= place < end]
        return (min(found), max(found) + 1) if found else (0, 0)

    from_rows = [sources(*need) for need in needs]
    x, _ = window(x, cut, from_rows)
    (begin, end), first = needs[cut.axis.rank], from_rows[cut.axis.rank][0]

    def copies(begin: int, end: int) -> Tensor:
        places = torch.tensor([inside(place) - first for place in range(begin, end)], device=x.device)
        return x.index_select(cut.dim, places.long())

    if begin >= 0 and end <= cut.total:
        return x
    low, high = min(max(begin, 0), end), max(min(end, cut.total), begin)
    parts = [copies(begin, low)] if begin < low else []
    if low < high:
        parts.append(x.narrow(cut.dim, low - first, high - low))
    parts += [copies(high, end)] if high < end else []
    return torch.cat(parts, cut.dim)


def padded(x: Tensor, pads: Sequence[tuple[int, int]], mode: str = "constant", value: float = 0.0) -> Tensor:
    """Pad each spatial dim by (before, after) rows."""
    if not any(any(pair) for pair in pads):
        return x
    flat = [rows for pair in reversed(pads) for rows in pair]
    return pad(x, flat, mode, value) if mode == "constant" else pad(x, flat, mode)
