"""Checked arguments of a loss over the samples of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from gradmesh._torch import transforms_active
from gradmesh._util.structure import Packed
from gradmesh.errors import ArgumentError, MismatchError, ShapeError, message
from gradmesh.nn.contrastive.layout import Gathered, Layout, Passed
from gradmesh.nn.contrastive.ring import RingPass
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.transport import compiling
from gradmesh.types import Convention, I, R
from gradmesh.verbs.call import Call, SizesLike, integer
from gradmesh.verbs.collectives import all_gather, all_reduce

__all__ = ["Gather", "LossInputs", "Number"]

Gather = Literal["all", "ring"]
Number = float | Tensor

_ON_CPU, _ELSEWHERE = 1024, 4096
"""Default rows and columns of a tile: it fits a CPU's caches, and keeps an accelerator busy."""

_WHOLE_ON_CPU, _WHOLE_ELSEWHERE = 2**22, 2**24
"""Up to this number of entries, a rank's rows of the table are one tile by default."""


class LossInputs:
    """Checked arguments of a loss over the samples of all ranks.

    Attributes:
        op: the name of the loss.
        axis: the ranks.
        rows: this rank's number of samples.
        sizes: each rank's number of samples; None: all the same.
        total: the number of samples of all ranks.
        numbers: the scale or temperature, and the bias.
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
        extra: str = "",
    ) -> None:
        """Check the arguments and, with sizes="auto", exchange the sizes.

        Args:
            op: the name of the loss.
            samples: its tensors by name, of one shape and dtype.
            axis: the ranks.
            sizes: as in verbs.
            dst: the type of the loss.
            gather: "all" or "ring".
            tile: the tile size; None: the default.
            dims: the allowed numbers of dimensions.
            numbers: real numbers that must be the same on every rank, such as a scale; compared if sizes="auto".
            extra: text that is appended to the signature that the ranks compare.
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
        self.sizes = self._counted(first, sizes, f"gather={gather!r}{extra}")
        self.total: int = self.rows * self.axis.size if self.sizes is None else sum(self.sizes)
        if self.total == 0:  # every rank raises
            raise ArgumentError(
                message(
                    "cannot compute the mean over zero samples",
                    op=op,
                    axis=str(self.axis),
                    expected="at least 1 sample over all ranks",
                    got="no samples on any rank",
                    remedy="skip this step on every rank",
                )
            )

    def _check(self, name: str, x: object, first: Tensor, dims: tuple[int, ...]) -> None:
        if not isinstance(x, Tensor) or x.dim() not in dims or not x.is_floating_point():
            got = f"{x.dtype} of shape {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            self._call.fail(
                f"{name} is not a floating-point tensor with {' or '.join(map(str, dims))} dimensions",
                expected="embeddings of shape (samples, features)"
                + (" or (samples, views, features)" if 3 in dims else ""),
                got=got,
                remedy="reshape it, e.g. x.flatten(1), and convert it, e.g. x.float()",
                kind=ShapeError,
            )
        if (x.shape, x.dtype, x.device) != (first.shape, first.dtype, first.device):
            self._call.fail(
                f"{name} does not match the other embeddings",
                expected=f"{first.dtype} of shape {list(first.shape)} on {first.device}",
                got=f"{x.dtype} of shape {list(x.shape)} on {x.device}",
                remedy="pass one row for each sample in both"
                if x.shape != first.shape
                else f"convert it to {first.dtype} on {first.device}",
                kind=ShapeError,
            )

    def _counted(self, first: Tensor, sizes: SizesLike, extra: str) -> tuple[int, ...] | None:
        if sizes != "auto" or isinstance(sizes, Tensor):
            given = self._call.sizes(sizes, 0)
            if given.equal:
                return None
            each, rank = tuple(given.explicit), self.axis.rank
            if each[rank] != self.rows:
                self._call.fail(
                    "sizes does not match this rank's number of samples",
                    expected=f"sizes[{rank}] == {self.rows}, the number of rows",
                    got=f"sizes={each}",
                    remedy=f"pass each rank's number of samples as sizes, here {self.rows} for rank {rank}, or "
                    'sizes="auto" to exchange them',
                )
            return each
        self._call.refuse_compiled(
            'sizes="auto" is not supported in a compiled program', "sizes=None, or e.g. sizes=(4, 3)"
        )
        signature = f"{self._call.verb} of {first.dtype} with {list(first.shape[1:])} features, {extra}"
        # Counts and numbers travel in one message; float64 represents both exactly.
        dtype = torch.float32 if first.device.type == "mps" else torch.float64
        numbers = {} if transforms_active() else self.numbers
        local = [torch.as_tensor(x, dtype=dtype, device=first.device) for x in (self.rows, *numbers.values())]
        found = all_gather(Packed(torch.stack(local).detach()[None], signature), self.axis)  # type: ignore[call-overload]
        rows = found.tolist()
        for column, name in enumerate(numbers, 1):
            self._same(name, [row[column] for row in rows])
        return tuple(int(row[0]) for row in rows)

    def _same(self, name: str, of_ranks: list[float]) -> None:
        """Raise if a number differs between ranks by more than rounding and a few training steps explain."""
        low, high = min(of_ranks), max(of_ranks)
        if high - low > 0.01 * max(abs(low), abs(high), 1e-6):
            raise MismatchError(
                message(
                    f"{name} differs between the ranks",
                    op=self.op,
                    axis=str(self.axis),
                    expected=f"the same {name} on every rank: each rank computes a part of one loss",
                    got="\n".join(f"rank {rank}: {name}={value:g}" for rank, value in enumerate(of_ranks)),
                    remedy="initialize it with the same value on every rank; if it is learned, make it a parameter of "
                    "the module that DDP or FSDP wraps, so that its gradients are averaged",
                )
            )

    def _size(self, tile: int | None) -> int | None:
        if tile is None:
            return None
        whole = integer(tile)
        if whole is None or whole < 1:
            self._call.fail(
                "tile must be a positive int or None",
                expected="e.g. tile=1024, the number of rows and columns in memory at once",
                got=f"tile={tile!r}",
                remedy="omit it for the default",
            )
        return whole

    def layout(
        self, comm_dtype: torch.dtype | None, backward_dtype: torch.dtype | None, views: int = 1
    ) -> Layout:
        """The table of all pairs, with `views` rows for each sample."""
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
        ring = RingPass.create(self.axis, each, comm_dtype, backward_dtype, self._call.x.device)
        return Passed(self.axis, each, tile, ring)

    def _number(self, name: str, value: Number) -> Number:
        one = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not one and (isinstance(value, bool) or not isinstance(value, int | float)):
            self._call.fail(
                f"{name} is not a real number",
                expected="a float, or a real tensor of one element",
                got=f"{name}={value!r}"
                if not isinstance(value, Tensor)
                else f"a {value.dtype} tensor of shape {list(value.shape)}",
                remedy=f"pass e.g. {name}=10.0",
            )
        return value.reshape(()) if isinstance(value, Tensor) else value

    def mean(self, share: Tensor, over: int | None = None) -> Tensor:
        """The mean over all samples, from this rank's sum."""
        return all_reduce(share / (over or self.total), self.axis, dst=self._dst)

    def fail(self, problem: str, *, expected: str, got: str, remedy: str) -> None:
        """Raise on this rank; the other ranks raise `MismatchError`."""
        self._call.fail(problem, expected=expected, got=got, remedy=remedy)
