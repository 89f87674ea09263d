"""`ColumnParallelLinear` and `RowParallelLinear`: linear layers with sharded outputs or inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gradmesh.nn.tensor.cuts import Cut, Parallel
from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import I
from gradmesh.verbs.collectives import all_gather, all_reduce, reduce_scatter, replicate, shard

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "Rows", "is_conv1d"]

Rows = Sequence[int] | Literal["balanced"] | None
"""Each rank's rows of a sequence: equal (None), as by `gm.shard` ("balanced"), or explicit sizes."""


def is_conv1d(layer: nn.Module) -> bool:
    """True for the `Conv1D` of transformers: a linear layer with a weight of shape (in, out)."""
    weight = layer._parameters.get("weight")
    return (
        type(layer).__name__ == "Conv1D"
        and weight is not None
        and weight.dim() == 2
        and weight.shape[1] == getattr(layer, "nf", None)
    )


class _Linear(Parallel):
    """A linear layer with sharded outputs or inputs."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed = False
    """True if the weight has shape (in, out), as in the `Conv1D` of transformers."""

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
        """Convert a dense layer; `options` are keyword arguments of the class.

        The dense layer may be the `Conv1D` of transformers, whose weight stays transposed.
        """
        sizes = options.pop("sizes", None)
        kind: type[Any] = cls  # a subclass
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
        """Take this rank's shard of the values."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The dense layer's sizes, and the local sizes."""
        return (
            f"{self.in_features}, {self.out_features}, local {tuple(reversed(self.matrix.shape))}"
            + self.called
        )


class ColumnParallelLinear(_Linear):
    """A linear layer with sharded outputs: the first of a tensor parallel pair.

    ::

        I -> V    x (..., in) -> local outputs (..., out_r)      backward sums x's gradient over the ranks
        V -> V    with `sequence_dim`: local rows of x are gathered first; backward is a reduce-scatter
        I -> I    with `gather_output`: all outputs (..., out) on every rank

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`, for the full layer.
        axis: the ranks.
        sequence_dim: the dim of the input that is sharded over the ranks (sequence parallelism); None: the input is
            replicated.
        rows: with `sequence_dim`, each rank's number of rows along it: None: equal; "balanced": as in `gm.shard`; or
            e.g. `rows=(4, 3)`.
        gather_output: True to gather all outputs on every rank, which then does identical work on them.
        sizes: each rank's number of outputs; None: an even split, with one more on the first ranks if there is a
            remainder.

    The full layer is initialized as `torch.nn.Linear`, and then sharded: with equal seeds on all ranks, the values are
    those of a single process.

    Raises:
        ArgumentError: invalid `sizes`; when called, the input has a wrong number of features.

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
            self.refuse(
                x,
                f"shape (..., {self.in_features})",
                "pass all features on every rank; only outputs are sharded",
            )
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
    """A linear layer with sharded inputs: the second of a tensor parallel pair.

    ::

        V -> I    local inputs (..., in_r) -> the sum of the ranks' products (..., out)   backward: identity
        V -> V    with `sequence_dim`: local rows of the sum (reduce-scatter)             backward gathers the rows

    Args:
        in_features, out_features, bias, device, dtype: as in `torch.nn.Linear`, for the full layer.
        axis: the ranks.
        sequence_dim: the dim of the output that is sharded over the ranks (sequence parallelism). The bias is then
            added to local rows, and its gradient is summed over the ranks.
        rows: with `sequence_dim`, each rank's number of rows along it; as in `ColumnParallelLinear`.
        split_input: True if the input is replicated; each rank takes its shard.
        sizes: each rank's number of inputs; None: an even split.

    Raises:
        ArgumentError: invalid `sizes`; when called, the input has a wrong number of features.

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
                self.refuse(
                    x,
                    f"shape (..., {self.in_features})",
                    "pass all features, or omit split_input for local ones",
                )
            x = shard(x, here, -1, sizes=self.cuts["weight"].sizes)
        elif x.shape[-1:] != self.matrix.shape[1:]:
            self.refuse(
                x,
                f"shape (..., {self.matrix.shape[1]})",
                "pass this rank's features, or construct the layer with split_input=True for a replicated input",
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
        # Under autocast y is narrower than the bias; the dense layer returns the narrow dtype.
        return y if bias is None else y + bias.to(y.dtype)
