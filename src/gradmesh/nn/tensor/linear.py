"""Linear layers that are cut over the ranks of an axis by their outputs or by their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gradmesh.axis import AxisLike
from gradmesh.collectives import all_gather, all_reduce, reduce_scatter, replicate, shard
from gradmesh.nn.tensor.cuts import Cut, Parallel
from gradmesh.types import I

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "Rows", "is_conv1d"]

Rows = Sequence[int] | Literal["balanced"] | None
"""Each rank's rows of a sequence: equal (None), as `gm.shard` cuts, or told."""


def is_conv1d(layer: nn.Module) -> bool:
    """Whether it is the `Conv1D` of transformers: a linear layer with a weight of shape (in, out)."""
    weight = layer._parameters.get("weight")
    return (
        type(layer).__name__ == "Conv1D"
        and weight is not None
        and weight.dim() == 2
        and weight.shape[1] == getattr(layer, "nf", None)
    )


class _Linear(Parallel):
    """A linear layer of which each rank has some of the outputs or of the inputs."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed = False
    """Whether the weight is (in, out), as that of the `Conv1D` of transformers."""

    def __init__(
        self,
        dense: nn.Linear,
        axis: AxisLike,
        sequence_dim: int | None,
        rows: Rows,
        sizes: Sequence[int] | None,
    ) -> None:
        super().__init__(axis)
        self.in_features, self.out_features = dense.in_features, dense.out_features
        self.sequence_dim, self.rows = sequence_dim, rows
        self._take(dense, sizes)

    @classmethod
    def of(cls, dense: nn.Linear, axis: AxisLike = None, **options: Any) -> Self:
        """The layer of a dense one's values; `options` as those of the class.

        The dense one may be the `Conv1D` of transformers, whose weight stays transposed.
        """
        sizes = options.pop("sizes", None)
        kind: type[Any] = cls  # this class itself is never made
        transposed = is_conv1d(dense)
        both = tuple(dense.weight.shape) if transposed else (dense.in_features, dense.out_features)
        made: Self = kind(*both, False, axis, device="meta", **options)
        made.transposed = transposed
        made._take(dense, sizes)
        return made

    @property
    def matrix(self) -> Tensor:
        """The local shard of the weight, as (out, in)."""
        return self.weight.t() if self.transposed else self.weight

    def _take(self, dense: nn.Linear, sizes: Sequence[int] | None) -> None:
        """Take this rank's part of the values."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The dense layer's numbers, and those of this rank's part."""
        own = tuple(reversed(self.matrix.shape))
        return f"{self.in_features}, {self.out_features}, own part {own}" + self.called


class ColumnParallelLinear(_Linear):
    """A linear layer of which each rank has some of the outputs: the first of a pair.

    ::

        I -> V    x (..., in) -> own outputs (..., out_r)        backward sums x's gradient over the ranks
        V -> V    with `sequence_dim`: own rows of x are gathered along it first; backward sums and keeps own rows
        I -> I    with `gather_output`: all outputs (..., out) on every rank

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`, for the whole layer.
        axis: the ranks.
        sequence_dim: the dim of the input that is cut over the ranks (sequence parallelism); None: the input is whole,
            and the same on every rank.
        rows: with `sequence_dim`, how many rows along it each rank has: None for equal parts, "balanced" as `gm.shard`
            cuts them, or the numbers.
        gather_output: whether every rank gets all outputs, to repeat the same work on them.
        sizes: how many outputs each rank has; None: an even cut, of which the first ranks get one more.

    The whole layer is drawn as `torch.nn.Linear` draws it, and cut: ranks that are seeded alike have one process's.

    Raises:
        ArgumentError: the sizes are no cut; where it is called, the input has another width.

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3; sequence parallelism: Korthikanti et al.
    (arXiv:2205.05198), section 4.2.

    Example:
        >>> def on_each_rank():
        ...     torch.manual_seed(0)
        ...     up, down = gm.nn.ColumnParallelLinear(3, 8), gm.nn.RowParallelLinear(8, 3)
        ...     x = torch.ones(2, 3, requires_grad=True)
        ...     y = down(up(x).relu())
        ...     y.sum().backward()
        ...     return tuple(up.weight.shape), tuple(y.shape), x.grad.norm().item()
        >>> a, b = gm.launch(on_each_rank, 2, backend="threads")
        >>> a == b, a[:2]
        (True, ((4, 3), (2, 3)))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        axis: AxisLike = None,
        *,
        sequence_dim: int | None = None,
        rows: Rows = None,
        gather_output: bool = False,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            nn.Linear(in_features, out_features, bias, device, dtype), axis, sequence_dim, rows, sizes
        )
        self.gather_output = gather_output

    def _take(self, dense: nn.Linear, sizes: Sequence[int] | None) -> None:
        cut = self.cut(0, self.out_features, sizes)
        self.put("weight", dense.weight, Cut(1, cut.sizes) if self.transposed else cut)
        self.put("bias", dense.bias, cut)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs; see the class."""
        if x.shape[-1:] != (self.in_features,):
            self.refuse(x, f"(..., {self.in_features})", "pass the whole width, on every rank")
        here = self.axis
        if self.sequence_dim is None:
            x = replicate(x, here)
        else:
            dim = self.along(x, self.sequence_dim)
            with self.naming_rows():
                x = all_gather(x, here, dim, sizes="auto" if self.rows == "balanced" else self.rows)
        y = linear(x, self.matrix, self.bias)
        return all_gather(y, here, -1, dst=I, sizes=self.cuts["weight"].sizes) if self.gather_output else y


class RowParallelLinear(_Linear):
    """A linear layer of which each rank has some of the inputs: the second of a pair.

    ::

        V -> I    own inputs (..., in_r) -> the sum of the ranks' products (..., out)     backward: identity
        V -> V    with `sequence_dim`: the sum, of which own rows along it stay           backward gathers the rows

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`, for the whole layer.
        axis: the ranks.
        sequence_dim: the dim of the output that is to be cut over the ranks (sequence parallelism). The bias is then
            used on own rows, and its gradient is summed over the ranks.
        rows: with `sequence_dim`, how many rows along it each rank gets; as in `ColumnParallelLinear`.
        split_input: whether the input is whole, and the same on every rank, which takes its part.
        sizes: how many inputs each rank has; None: an even cut.

    Raises:
        ArgumentError: the sizes are no cut; where it is called, the input has another width than the own part.

    Source: as `ColumnParallelLinear`.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.RowParallelLinear(2, 1, bias=False)
        ...     gm.nn.load_dense_state_dict(layer, {"weight": torch.tensor([[1.0, 10.0]])})
        ...     return layer(torch.tensor([2.0 + gm.rank()])).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [32.0, 32.0]
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        axis: AxisLike = None,
        *,
        sequence_dim: int | None = None,
        rows: Rows = None,
        split_input: bool = False,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            nn.Linear(in_features, out_features, bias, device, dtype), axis, sequence_dim, rows, sizes
        )
        self.split_input = split_input

    def _take(self, dense: nn.Linear, sizes: Sequence[int] | None) -> None:
        self.put("weight", dense.weight, self.cut(int(not self.transposed), self.in_features, sizes))
        self.put("bias", dense.bias, None)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs; see the class."""
        here = self.axis
        if self.split_input:
            if x.shape[-1:] != (self.in_features,):
                self.refuse(x, f"(..., {self.in_features})", "pass the whole width, or leave out split_input")
            x = shard(x, here, -1, sizes=self.cuts["weight"].sizes)
        elif x.shape[-1:] != self.matrix.shape[1:]:
            self.refuse(
                x,
                f"(..., {self.matrix.shape[1]})",
                "pass the own part, or say split_input=True for a whole input",
            )
        y = linear(x, self.matrix)
        bias: Tensor | None = self.bias
        if self.sequence_dim is None:
            y = all_reduce(y, here, dst=I)
        else:
            dim = self.along(y, self.sequence_dim)
            with self.naming_rows():
                y = reduce_scatter(y, here, dim, sizes=self.rows)
            bias = None if bias is None else replicate(bias, here)
        # Under autocast the product alone is of the narrow dtype, as all of the dense layer's result.
        return y if bias is None else y + bias.to(y.dtype)
