"""`tensor_parallel`: convert layers of a dense module to tensor parallel layers, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradmesh._torch import is_fake
from gradmesh._util.structure import Packed
from gradmesh.errors import ArgumentError, MismatchError, message
from gradmesh.nn.graph.agree import exchange_device
from gradmesh.nn.sharding import Sharding
from gradmesh.nn.tensor.cuts import Parallel, Replicated
from gradmesh.nn.tensor.embedding import VocabParallelEmbedding
from gradmesh.nn.tensor.linear import ColumnParallelLinear, RowParallelLinear, Rows, is_conv1d
from gradmesh.runtime.checking import check_level
from gradmesh.runtime.mesh import Axis, AxisLike, resolve
from gradmesh.transport.call_checks import checksum
from gradmesh.transport.withdrawal import withdraw
from gradmesh.verbs.collectives import all_gather

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
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> nn.Module:
    """Convert layers of a module to tensor parallel layers with the same values, in place.

    Checksums of the parameters are compared between the ranks, in one message (not with `gradmesh.check(0)`).

    Args:
        module: a module of torch layers, with the same values on every rank.
        styles: maps patterns (with * and ?) of names, as in `named_modules`, to styles; the first match counts.
            "column" and "row": `nn.Linear`, or the `Conv1D` of transformers, whose weight stays transposed; "column,
            gathered": a column parallel layer whose outputs are gathered; "vocab": `nn.Embedding`; "replicated": any
            module that works on local rows, such as the norms of a sequence parallel region.
        axis: the ranks.
        sequence_dim: the dim that is sharded between the pairs of layers (sequence parallelism), for all styles but
            "column, gathered".
        rows: each rank's number of rows along it; as in `ColumnParallelLinear`.
        sizes: for patterns of `styles`, each rank's number of outputs ("column"), inputs ("row") or vocabulary entries
            ("vocab"), e.g. `sizes={"head": (5, 3)}`; the others are sharded evenly.

    Returns:
        The module. Tied parameters stay tied if they are sharded in the same way, and a layer with two names stays one
        layer. Hooks of the replaced layers are dropped.

    Raises:
        ArgumentError: a pattern matches no module; a style does not support the matched module (a subclass that
            overrides `forward`, a layer inside a replicated module, an adapter such as LoRA); a tied parameter would be
            sharded in two ways, or in only one of its layers; invalid `sizes`. The module is unchanged.
        MismatchError: the ranks' modules or arguments differ; the error names the parameters. The module is unchanged.

    Example:
        >>> import copy
        >>> whole = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
        >>> def on_each_rank():
        ...     net, x = copy.deepcopy(whole), torch.ones(2, 3)
        ...     dense = net(x)
        ...     gm.nn.tensor_parallel(net, {"0": "column", "2": "row"})
        ...     return torch.allclose(net(x), dense), net[0].weight.numel()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(True, 12), (True, 12)]
    """
    here = resolve(axis, "nn.tensor_parallel")
    names = dict[nn.Module, list[str]]()
    for name, each in module.named_modules(remove_duplicate=False):
        names.setdefault(each, []).append(name)
    try:
        made = _layers(module, names, styles, axis, here, sequence_dim, rows, sizes or {})
    except ArgumentError as error:
        withdraw("nn.tensor_parallel", here, None, error)
        raise
    signature = f"tensor_parallel({dict(styles)}, {sequence_dim=}, {rows=}, {sizes=})"
    _compare_parameters(module, here, signature)
    # All checks come before the first change: on errors the module is unchanged.
    for each, new in made.items():
        for name in names[each]:
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, new)
            for ancestor in _ancestors(module, name):
                _disable_fast_path(ancestor)
    return module


def _layers(
    module: nn.Module,
    names: dict[nn.Module, list[str]],
    styles: Mapping[str, Style],
    axis: AxisLike,
    here: Axis,
    sequence_dim: int | None,
    rows: Rows,
    sizes: Mapping[str, Sequence[int]],
) -> dict[nn.Module, nn.Module]:
    """The parallel layer for each matched module."""
    if unknown := [pattern for pattern in sizes if styles.get(pattern, "replicated") == "replicated"]:
        _refuse(
            here,
            "sizes has patterns that are not in styles, or that are replicated",
            f"patterns of styles that are not replicated: {', '.join(map(repr, styles))}",
            ", ".join(map(repr, unknown)),
            "use the same pattern in styles and in sizes",
        )
    chosen = _chosen(module, names, styles, axis, here)
    made, tied = dict[nn.Module, nn.Module](), dict[int, tuple[nn.Parameter, object]]()
    for each, pattern in chosen.items():
        name = names[each][0]
        new = made[each] = _made(each, styles[pattern], axis, sequence_dim, rows, sizes.get(pattern))
        new.training = each.training
        if isinstance(new, Parallel):
            new.path = name
            _tie(new, dict(each.named_parameters(recurse=False)), tied, here, name)
    for each, (name, *_) in names.items():
        kept = () if isinstance(made.get(each), Parallel) else each.named_parameters(recurse=False)
        if any(id(parameter) in tied for _, parameter in kept):
            _refuse(
                here,
                f"a parameter of {name or 'the module itself'!r} is tied to a parameter that would be sharded",
                "a style for both layers, which shards them in the same way",
                f"styles for {', '.join(styles)}",
                f"add {name!r} to styles, or untie the parameters",
            )
    return made


def _disable_fast_path(ancestor: nn.Module) -> None:
    """Disable torch's inference fast path, which reads the weights of inner layers without calling them."""
    if isinstance(ancestor, nn.TransformerEncoderLayer):
        ancestor.activation_relu_or_gelu = 0
    elif isinstance(ancestor, nn.TransformerEncoder):
        ancestor.use_nested_tensor = False


def _compare_parameters(module: nn.Module, here: Axis, signature: str) -> None:
    """Compare replicated parameters between ranks, by checksums."""
    if here.size == 1 or not check_level():
        return
    ours, known = set(here.global_ranks), Sharding()
    compared = {
        name: parameter
        for name, parameter in module.named_parameters()
        if type(parameter) is nn.Parameter
        and not parameter.is_meta
        and not is_fake(parameter)
        and not any(len(ours & set(axis.global_ranks)) > 1 for axis in known.over(parameter))
    }
    shapes = [(name, tuple(each.shape), each.dtype) for name, each in compared.items()]
    number = checksum(torch.tensor(list(repr(shapes).encode()), dtype=torch.uint8))
    signature += f" of {len(shapes)} parameters, names and shapes checksum {number}"
    local = torch.tensor(
        [checksum(each.detach()) for each in compared.values()], device=exchange_device(here)
    )
    with torch.no_grad():
        rows: Tensor = all_gather(Packed(local.unsqueeze(0), signature), here)  # type: ignore[call-overload]
    same = (rows == rows[:1]).all(0).tolist()
    differing = [name for name, equal in zip(compared, same, strict=True) if not equal]
    if differing:
        more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
        others = [str(rank) for rank, row in enumerate(rows.tolist()) if row != rows[0].tolist()]
        raise MismatchError(
            message(
                "the ranks' modules have different values",
                op="nn.tensor_parallel",
                axis=str(here),
                expected="the same dense module on every rank, before it is sharded",
                got=f"{', '.join(differing[:5])}{more} differ between rank {', '.join(others)} and rank 0",
                remedy="construct the module after torch.manual_seed(0) on every rank, load the same checkpoint, or "
                "gradmesh.broadcast the parameters; mark custom shards with gradmesh.nn.mark_sharded first",
            )
        )


def _chosen(
    module: nn.Module,
    all_names: dict[nn.Module, list[str]],
    styles: Mapping[str, Style],
    axis: AxisLike,
    here: object,
) -> dict[nn.Module, str]:
    """The matched modules, and the pattern of each."""
    unused, chosen = dict.fromkeys(styles), dict[nn.Module, str]()
    for each, names in all_names.items():
        fitting = (next((one for one in styles if fnmatchcase(name, one)), None) for name in names)
        patterns = [pattern for pattern in fitting if pattern is not None]
        if not patterns or isinstance(each, Parallel | Replicated):
            continue
        for pattern in patterns:
            unused.pop(pattern, None)
        name, style = names[0], styles[patterns[0]]
        if any(styles[pattern] != style for pattern in patterns):
            got = ", ".join(f"{pattern!r}: {styles[pattern]!r}" for pattern in patterns)
            problem = f"{name!r} is a layer with two names, which have different styles"
            _refuse(here, problem, "the same style for both names", got, f"use {style!r} for both patterns")
        ancestors = _ancestors(module, name)
        if why := _unsupported(each, style, ancestors):
            _refuse(
                here,
                f"cannot convert {name or 'the module itself'!r} with style {style!r}: {why}",
                "a submodule of the type that the style supports: "
                + ", ".join(f"{kind!r} {of.__name__}" for kind, of in _DENSE.items()),
                f"{patterns[0]!r}: {style!r} for {type(each).__name__} {name!r}",
                "call tensor_parallel before adding adapters, or merge them first"
                if "adapter" in why
                else "use a pattern that matches only layers of the supported type",
            )
        within = [
            outer
            for other in names
            for outer in _ancestors(module, other)
            if outer in chosen or (isinstance(outer, Parallel | Replicated) and outer.over == axis)
        ]
        if within and style != "replicated":
            _refuse(
                here,
                f"{name!r} is inside a module that is replicated over the same ranks",
                "replicated and sharded layers that are not nested",
                f"{patterns[0]!r}: {style!r}",
                "use patterns that replicate its siblings one by one, instead of the enclosing module",
            )
        if not within:  # else the enclosing module replicates it too
            chosen[each] = patterns[0]
    if unused:
        _refuse(
            here,
            "a pattern matches no module",
            "names as in named_modules: " + ", ".join(name for name, _ in module.named_modules() if name),
            ", ".join(map(repr, unused)),
            "correct the pattern, or remove it",
        )
    return chosen


def _ancestors(module: nn.Module, name: str) -> list[nn.Module]:
    """The modules that enclose the one of this name, outermost first."""
    steps = name.split(".") if name else []
    return [module.get_submodule(".".join(steps[:depth])) for depth in range(len(steps))]


def _unsupported(each: nn.Module, style: str, ancestors: list[nn.Module]) -> str:
    """Why a style does not support a module; empty if it does."""
    kind = _DENSE.get(style)
    if _is_adapter(each) and style != "replicated":
        return "it is an adapter (LoRA), whose low-rank weights would not be sharded"
    if ancestors and _is_adapter(ancestors[-1]):
        return "it is wrapped by an adapter (LoRA), whose low-rank weights would not be sharded"
    if ancestors and kind is nn.Linear and is_conv1d(each):
        return ""
    if kind is None:
        return "unknown style"
    if not ancestors:
        return "it is the root module, which cannot be replaced"
    if not isinstance(each, kind):
        return f"it is a {type(each).__name__}"
    if isinstance(ancestors[-1], nn.MultiheadAttention):
        return "nn.MultiheadAttention reads its weights without calling it"
    if kind is not nn.Module and type(each).forward is not kind.forward:
        return f"{type(each).__name__} overrides forward"
    if kind is not nn.Module and "weight" not in dict(each.named_parameters(recurse=False)):
        return "its weight is computed from other parameters"
    return ""


def _is_adapter(each: nn.Module) -> bool:
    """True for a layer of peft, which adds low-rank weights to the layer that it wraps."""
    return "base_layer" in each._modules


def _made(
    each: Any,
    style: str,
    axis: AxisLike,
    sequence_dim: int | None,
    rows: Rows,
    sizes: Sequence[int] | None,
) -> nn.Module:
    if style == "replicated":
        return Replicated(each, axis)
    if style == "vocab":
        return VocabParallelEmbedding.of(each, axis, sequence_dim=sequence_dim, rows=rows, sizes=sizes)
    if style == "row":
        return RowParallelLinear.of(each, axis, sequence_dim=sequence_dim, rows=rows, sizes=sizes)
    gathered = style != "column"
    along = None if gathered else sequence_dim
    return ColumnParallelLinear.of(
        each, axis, sequence_dim=along, rows=rows, gather_output=gathered, sizes=sizes
    )


def _tie(made: Parallel, old: dict[str, nn.Parameter], tied: dict[int, Any], here: Any, name: str) -> None:
    """Share the sharded parameters of tied dense parameters."""
    for key, dense in old.items():
        cut = made.cuts.get(key)
        known = tied.setdefault(id(dense), (getattr(made, key), cut, dense))
        if known[1] != cut:
            _refuse(
                here,
                f"the tied parameter {name}.{key} would be sharded in two ways",
                f"the same in both layers, {known[1]}",
                str(cut),
                "shard both layers along the same dim (e.g. a vocab parallel table and a column parallel head), or "
                "untie them",
            )
        setattr(made, key, known[0])


def _refuse(here: object, problem: str, expected: str, got: str, remedy: str) -> None:
    raise ArgumentError(
        message(problem, op="nn.tensor_parallel", axis=str(here), expected=expected, got=got, remedy=remedy)
    )
