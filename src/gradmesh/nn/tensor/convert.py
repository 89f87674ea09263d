"""Make the layers of a dense module parallel, in place."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from gradmesh.axis import AxisLike, resolve
from gradmesh.errors import ArgumentError, message
from gradmesh.nn.tensor.cuts import Parallel, Replicated
from gradmesh.nn.tensor.embedding import VocabParallelEmbedding
from gradmesh.nn.tensor.linear import ColumnParallelLinear, RowParallelLinear, Rows

__all__ = ["tensor_parallel"]

Style = Literal["column", "column, gathered", "row", "vocab", "replicated"]

_DENSE: dict[str, type[nn.Module]] = {
    "column": nn.Linear,
    "column, gathered": nn.Linear,
    "row": nn.Linear,
    "vocab": nn.Embedding,
    "replicated": nn.Module,
}


def tensor_parallel(
    module: nn.Module,
    styles: Mapping[str, Style],
    axis: AxisLike = None,
    *,
    sequence_dim: int | None = None,
    rows: Rows = None,
) -> nn.Module:
    """Turn layers of a module into parallel ones of the same values, in place. Nothing is sent.

    Args:
        module: a module of plain torch, with the same values on every rank.
        styles: for names of its modules, as in `named_modules`, with * and ?: "column" and "row" for `nn.Linear`,
            "column, gathered" for one whose outputs every rank needs, "vocab" for `nn.Embedding`, "replicated" for
            what works on own rows, as the norms of a sequence parallel region. The first pattern that fits counts.
        axis: the ranks.
        sequence_dim: the dim that is cut over the ranks between the pairs of layers (sequence parallelism), for all but
            "column, gathered".
        rows: how many rows along it each rank has; as in `ColumnParallelLinear`.

    Returns:
        The module. Parameters that were tied still are, if they are cut alike.

    Raises:
        ArgumentError: a pattern fits no module, or one of another kind; a tied parameter would be cut in two ways.

    Example:
        >>> def on_each_rank():
        ...     torch.manual_seed(0)
        ...     net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
        ...     x = torch.ones(2, 3)
        ...     dense = net(x)
        ...     gm.nn.tensor_parallel(net, {"0": "column", "2": "row"})
        ...     return torch.allclose(net(x), dense), net[0].weight.numel()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(True, 12), (True, 12)]
    """
    here = resolve(axis, "nn.tensor_parallel")
    unused, tied = dict.fromkeys(styles), dict[int, tuple[nn.Parameter, object]]()
    for name, each in list(module.named_modules()):
        pattern = next((one for one in styles if fnmatchcase(name, one)), None)
        if pattern is None or isinstance(each, Parallel | Replicated):
            continue
        unused.pop(pattern, None)
        style = styles[pattern]
        if style not in _DENSE or not isinstance(each, _DENSE[style]) or not name:
            _refuse(
                here,
                f"{name or 'the module itself'!r} cannot be made parallel in this way",
                "the name of a module in it, of the kind that its style is for: "
                + ", ".join(f"{kind!r} {of.__name__}" for kind, of in _DENSE.items()),
                f"{pattern!r}: {style!r} for {type(each).__name__}",
                "name the layers by a pattern that fits no others",
            )
        old = dict(each.named_parameters(recurse=False))
        made = _made(each, style, axis, sequence_dim, rows)
        if isinstance(made, Parallel):
            _tie(made, old, tied, here, name)
        room, _, last = name.rpartition(".")
        setattr(module.get_submodule(room), last, made)
    if unused:
        _refuse(
            here,
            "a pattern fits no module",
            "names as in named_modules: " + ", ".join(name for name, _ in module.named_modules() if name),
            ", ".join(map(repr, unused)),
            "mend the pattern, or leave it out",
        )
    return module


def _made(each: Any, style: str, axis: AxisLike, sequence_dim: int | None, rows: Rows) -> nn.Module:
    if style == "replicated":
        return Replicated(each, axis)
    if style == "vocab":
        return VocabParallelEmbedding.of(each, axis, sequence_dim=sequence_dim, rows=rows)
    if style == "row":
        return RowParallelLinear.of(each, axis, sequence_dim=sequence_dim, rows=rows)
    gathered = style != "column"
    return ColumnParallelLinear.of(
        each, axis, sequence_dim=None if gathered else sequence_dim, rows=rows, gather_output=gathered
    )


def _tie(made: Parallel, old: dict[str, nn.Parameter], tied: dict[int, Any], here: Any, name: str) -> None:
    """Give the layer the parameter that another one has already made of the same dense one."""
    for own, dense in old.items():
        cut = made.cuts.get(own)
        known = tied.setdefault(id(dense), (getattr(made, own), cut, dense))
        if known[1] != cut:
            _refuse(
                here,
                f"the tied parameter {name}.{own} would be cut in two ways",
                f"one cut: {known[1]}",
                str(cut),
                "cut both layers along the same dim, or untie them",
            )
        setattr(made, own, known[0])


def _refuse(here: object, problem: str, expected: str, got: str, remedy: str) -> None:
    raise ArgumentError(
        message(problem, op="nn.tensor_parallel", axis=str(here), expected=expected, got=got, remedy=remedy)
    )
