"""What a loss over the samples of all ranks is given: checked, counted over the ranks, and laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from gradmesh._torch import transforms_active
from gradmesh.arguments import Call, SizesLike, integer
from gradmesh.axis import Axis, AxisLike
from gradmesh.collectives import all_gather, all_reduce
from gradmesh.errors import ArgumentError, MismatchError, ShapeError, message
from gradmesh.nn.contrastive.layout import Gathered, Layout, Passed
from gradmesh.nn.contrastive.ring import Round
from gradmesh.structure import Packed
from gradmesh.transport import compiling
from gradmesh.types import Convention, I, R

__all__ = ["Gather", "LossInputs", "Number"]

Gather = Literal["all", "ring"]
Number = float | Tensor

_ON_CPU, _ELSEWHERE = 1024, 4096
"""Rows and columns of a tile by default: what a CPU's caches hold, and enough work for a device."""

_WHOLE_ON_CPU, _WHOLE_ELSEWHERE = 2**22, 2**24
"""How many entries a rank's rows of the table have at most for them to be one tile by default."""


class LossInputs:
    """The samples of a loss, one part on each rank.

    Attributes:
        op: the loss.
        axis: the ranks.
        rows: this rank's number of samples.
        sizes: each rank's; None: all the same.
        total: that of all ranks.
        numbers: the scale or temperature, and the bias, checked.
    """

    def __init__(
        self,
        op: str,
        samples: Mapping[str, Tensor],
        axis: AxisLike,
        *,
        sizes: SizesLike,
        dst: Convention,
        gather: Gather = "all",
        tile: int | None = None,
        dims: tuple[int, ...] = (2,),
        numbers: Mapping[str, Number] | None = None,
        said: str = "",
    ) -> None:
        """Check, and ask the ranks for their sizes.

        Args:
            op: the loss.
            samples: its tensors by name, of one shape and dtype.
            axis: the ranks.
            sizes: as verbs take them.
            dst: what the loss is on the ranks.
            gather: whether the columns of a table of pairs are gathered or go round.
            tile: the size of its tiles; None: what is known to be fast.
            dims: how many dimensions a tensor may have.
            numbers: real numbers that have to be the same on every rank, such as a scale; with sizes="auto" they travel
                with the sizes and are compared.
            said: what else every rank has to say alike.
        """
        first = next(iter(samples.values()))
        self.op = op
        self._call = call = Call(op, first, axis)
        self.axis: Axis = call.axis
        self._dst: Convention = call.choose("dst", dst, {R: R, I: I})
        for name, x in samples.items():
            self._check(name, x, first, dims)
        self._gather = call.choose("gather", gather, {"all": "all", "ring": "ring"})
        self._tile = self._size(tile)
        self.rows: int = first.shape[0]
        self.numbers = {name: self._number(name, value) for name, value in (numbers or {}).items()}
        self.sizes = self._counted(first, sizes, f"gather={gather!r}{said}")
        self.total: int = self.rows * self.axis.size if self.sizes is None else sum(self.sizes)
        if self.total == 0:  # which every rank sees
            raise ArgumentError(
                message(
                    "there is nothing to take the mean of",
                    op=op,
                    axis=str(self.axis),
                    expected="a rank with a sample",
                    got="no sample on any rank",
                    remedy="leave the step out on every rank",
                )
            )

    def _check(self, name: str, x: object, first: Tensor, dims: tuple[int, ...]) -> None:
        if not isinstance(x, Tensor) or x.dim() not in dims or not x.is_floating_point():
            got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            self._call.fail(
                f"{name} holds no embeddings",
                expected=f"real numbers of {' or '.join(map(str, dims))} dimensions, a row for each sample",
                got=got,
                remedy="pass a tensor of shape (samples, features)",
                kind=ShapeError,
            )
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            self._call.fail(
                f"{name} does not fit the other embeddings",
                expected=f"{first.dtype} of shape {list(first.shape)} on {first.device}",
                got=f"{x.dtype} of shape {list(x.shape)} on {x.device}",
                remedy="pass a row for each sample in both, of one dtype",
                kind=ShapeError,
            )

    def _counted(self, first: Tensor, sizes: SizesLike, said: str) -> tuple[int, ...] | None:
        if sizes != "auto" or isinstance(sizes, Tensor):
            told = self._call.sizes(sizes, 0)
            if told.equal:
                return None
            if told[self.axis.rank] != self.rows:
                self._call.fail(
                    "sizes has another number for this rank",
                    expected=f"{self.rows} at place {self.axis.rank}, as many as there are rows",
                    got=f"sizes={tuple(told.explicit)}",
                    remedy='give each rank\'s number of samples, or sizes="auto"',
                )
            return tuple(told.explicit)
        self._call.refuse_compiled("sizes are asked for in a compiled program", "sizes=None, or the sizes")
        words = f"{self._call.verb} of {first.dtype} with {list(first.shape[1:])} features, {said}"
        # Counts and numbers as one message; double precision has both exactly.
        dtype = torch.float32 if first.device.type == "mps" else torch.float64
        numbers = {} if transforms_active() else self.numbers
        mine = [torch.as_tensor(x, dtype=dtype, device=first.device) for x in (self.rows, *numbers.values())]
        found = all_gather(Packed(torch.stack(mine).detach()[None], words), self.axis)  # type: ignore[call-overload]
        rows = found.tolist()
        for column, name in enumerate(numbers, 1):
            self._same(name, [row[column] for row in rows])
        return tuple(int(row[0]) for row in rows)

    def _same(self, name: str, of_ranks: list[float]) -> None:
        """Refuse a number that differs between ranks by more than rounding and a few steps of training explain."""
        low, high = min(of_ranks), max(of_ranks)
        if high - low > 0.01 * max(abs(low), abs(high), 1e-6):
            raise MismatchError(
                message(
                    f"{name} differs between the ranks",
                    op=self.op,
                    axis=str(self.axis),
                    expected=f"the same {name} on every rank, as each computes a part of one loss",
                    got="\n".join(f"rank {rank}: {name}={value:g}" for rank, value in enumerate(of_ranks)),
                    remedy=f"start the ranks with one value, and average the gradients of a learned {name}: keep it in "
                    "the module that DDP or FSDP wraps",
                )
            )

    def _size(self, tile: int | None) -> int | None:
        if tile is None:
            return None
        whole = integer(tile)
        if whole is None or whole < 1:
            self._call.fail(
                "tile is no size",
                expected="an int of 1 or more, or None",
                got=f"tile={tile!r}",
                remedy="leave it out, or pass how many rows and columns are in memory at once",
            )
        return whole

    def layout(
        self, comm_dtype: torch.dtype | None, backward_dtype: torch.dtype | None, views: int = 1
    ) -> Layout:
        """The table of all pairs of samples.

        Args:
            comm_dtype: what columns travel in.
            backward_dtype: what their gradients travel in.
            views: how many rows a sample has.
        """
        sizes = None if self.sizes is None else tuple(n * views for n in self.sizes)
        each = sizes or (self.rows * views,) * self.axis.size
        tile, on_cpu = self._tile, self._call.x.is_cpu
        if tile is None:
            entries = max(each) * sum(each)
            tile = _ON_CPU if on_cpu else _ELSEWHERE
            if entries <= (_WHOLE_ON_CPU if on_cpu else _WHOLE_ELSEWHERE):
                tile = max(tile, sum(each))
        if self._gather == "all" or compiling():
            return Gathered(self.axis, sizes, tile, comm_dtype, backward_dtype)
        way = Round.started(self.axis, each, comm_dtype, backward_dtype, self._call.x.device)
        return Passed(self.axis, each, tile, way)

    def _number(self, name: str, value: Number) -> Number:
        """One real number, such as a scale."""
        one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not one and (isinstance(value, bool) or not isinstance(value, int | float)):
            self._call.fail(
                f"{name} is not a number",
                expected="a float, or a tensor of one real element",
                got=f"{name}={value!r}" if not isinstance(value, Tensor) else f"a tensor {list(value.shape)}",
                remedy="pass the number itself, not its logarithm",
            )
        return value.reshape(()) if isinstance(value, Tensor) else value

    def mean(self, share: Tensor, over: int | None = None) -> Tensor:
        """The mean over all samples of which this rank has summed its own."""
        return all_reduce(share / (over or self.total), self.axis, dst=self._dst)

    def fail(self, problem: str, *, expected: str, got: str, remedy: str) -> None:
        """Refuse what was given; the other ranks hear of it."""
        self._call.fail(problem, expected=expected, got=got, remedy=remedy)
