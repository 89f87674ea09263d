"""`VocabParallelEmbedding`: an embedding table that is sharded over the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gradmesh.errors import ArgumentError, message
from gradmesh.nn.tensor.cuts import Parallel
from gradmesh.nn.tensor.linear import Rows
from gradmesh.nn.tensor.vocab import check_replicated, local_ids, out_of_range
from gradmesh.runtime.mesh import AxisLike
from gradmesh.types import I
from gradmesh.verbs.collectives import all_reduce, reduce_scatter

__all__ = ["VocabParallelEmbedding"]


class VocabParallelEmbedding(Parallel):
    """An embedding with the vocabulary sharded over the ranks: each rank looks up its rows, and the results are summed.

    ::

        I -> I    ids (...) -> vectors (..., dim)                     backward: identity
        I -> V    with `sequence_dim`: local rows of the vectors      backward gathers the rows

    Args:
        num_embeddings, embedding_dim, padding_idx, device, dtype: as in `torch.nn.Embedding`, for the full table.
        axis: the ranks.
        sequence_dim: the dim of the vectors that is sharded over the ranks (sequence parallelism).
        rows: with `sequence_dim`, each rank's number of rows along it; as in `ColumnParallelLinear`.
        sizes: each rank's number of vocabulary entries; None: an even split, with one more on the first ranks if there
            is a remainder. The vocabulary needs no padding.

    Raises:
        ArgumentError: invalid `sizes`; when called, an id is out of range (detected on a CPU).

    Source: Shoeybi et al., Megatron-LM (arXiv:1909.08053), section 3.

    Example:
        >>> def on_each_rank():
        ...     layer = gm.nn.VocabParallelEmbedding(3, 1)
        ...     gm.nn.load_dense_state_dict(layer, {"weight": torch.tensor([[5.0], [6.0], [7.0]])})
        ...     return layer(torch.tensor([2, 0, 1])).flatten().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [[7.0, 5.0, 6.0], [7.0, 5.0, 6.0]]
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        axis: AxisLike = None,
        *,
        sequence_dim: int | None = None,
        rows: Rows = None,
        sizes: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(axis)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_dim, self.rows = sequence_dim, rows
        dense = nn.Embedding(num_embeddings, embedding_dim, padding_idx, device=device, dtype=dtype)
        self._take(dense, sizes)

    @classmethod
    def of(
        cls,
        dense: nn.Embedding,
        axis: AxisLike = None,
        *,
        sequence_dim: int | None = None,
        rows: Rows = None,
        sizes: Sequence[int] | None = None,
    ) -> VocabParallelEmbedding:
        """Convert a dense layer.

        Raises:
            ArgumentError: the dense layer uses `max_norm`, `scale_grad_by_freq` or `sparse`, which are not supported.
        """
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(dense, option):
                raise ArgumentError(
                    message(
                        f"{option} is not supported for a sharded table",
                        op=f"nn.{cls.__name__}.of",
                        expected=f"an embedding without {option}",
                        got=f"{option}={getattr(dense, option)!r}",
                        remedy=f"construct the embedding without {option}, or do not shard it",
                    )
                )
        numbers = (dense.num_embeddings, dense.embedding_dim, dense.padding_idx)
        made = cls(*numbers, axis, sequence_dim=sequence_dim, rows=rows, device="meta")
        made._take(dense, sizes)
        return made

    def _take(self, dense: nn.Embedding, sizes: Sequence[int] | None) -> None:
        self.padding_idx = dense.padding_idx
        self.put("weight", dense.weight, self.cut(0, self.num_embeddings, sizes))

    def forward(self, ids: Tensor) -> Tensor:
        """The vectors; see the class."""
        here, sizes = self.axis, self.cuts["weight"].sizes
        rank = here.rank
        wanted, remedy = f"ids from 0 to {self.num_embeddings - 1}", "pass global vocabulary ids as int64"
        if ids.dtype not in (torch.int64, torch.int32):
            self.refuse(ids, f"{wanted}, as int64", remedy, f"{ids.dtype}")
        if out_of_range(ids, self.num_embeddings):
            self.refuse(ids, wanted, remedy, f"ids from {int(ids.min())} to {int(ids.max())}")
        check_replicated(ids, here)
        local, mask = local_ids(ids, sizes, rank)
        if sizes[rank]:
            # Not F.embedding: its double backward raises for empty input.
            rows = self.weight.index_select(0, local.reshape(-1)).view(*ids.shape, self.embedding_dim)
            found = rows.masked_fill(~mask.unsqueeze(-1), 0)
            if self.padding_idx is not None:
                found = torch.where((ids == self.padding_idx).unsqueeze(-1), found.detach(), found)
        else:  # an empty shard: zeros that are part of the graph
            found = self.weight.sum() * self.weight.new_zeros(*ids.shape, self.embedding_dim)
        if self.sequence_dim is None:
            return all_reduce(found, here, dst=I)
        dim = self.along(found, self.sequence_dim)
        with self.naming_rows():
            return reduce_scatter(found, here, dim, sizes=self.rows)

    def extra_repr(self) -> str:
        """The dense layer's sizes, and the local size."""
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, local entries {self.weight.shape[0]}" + self.called
        )
