"""Make the layers of a dense module parallel, in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gradmesh._torch import is_fake
from gradmesh.axis import Axis, AxisLike, resolve
from gradmesh.checking import check_level
from gradmesh.collectives import all_gather
from gradmesh.errors import ArgumentError, MismatchError, message
from gradmesh.nn.graph.agree import meeting
from gradmesh.nn.sharding import Sharding
from gradmesh.nn.tensor.cuts import Parallel, Replicated
from gradmesh.nn.tensor.embedding import VocabParallelEmbedding
from gradmesh.nn.tensor.linear import ColumnParallelLinear, RowParallelLinear, Rows, is_conv1d
from gradmesh.structure import Packed
from gradmesh.transport.values import checksum
from gradmesh.withdrawal import withdraw

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
    """Turn layers of a module into parallel ones of the same values, in place.

    One message is sent: a checksum of each parameter, which has to be the same on every rank (not with
    `gradmesh.check(0)`).

    Args:
        module: a module of plain torch, with the same values on every rank.
        styles: for names of its modules, as in `named_modules`, with * and ?: "column" and "row" for `nn.Linear` and
            the `Conv1D` of transformers, whose weight stays transposed, "column, gathered" for one whose outputs every
            rank needs, "vocab" for `nn.Embedding`, "replicated" for what works on own rows, as the norms of a sequence
            parallel region. The first pattern that fits counts.
        axis: the ranks.
        sequence_dim: the dim that is cut over the ranks between the pairs of layers (sequence parallelism), for all but
            "column, gathered".
        rows: how many rows along it each rank has; as in `ColumnParallelLinear`.
        sizes: for patterns of `styles`, how many outputs ("column"), inputs ("row") or words ("vocab") each rank has;
            an even cut for the others.

    Returns:
        The module. Parameters that were tied still are, if they are cut alike, and a layer with two names is one
        layer still. Hooks of the layers that were are not taken over.

    Raises:
        ArgumentError: a pattern fits no module, or one of another kind, as is a subclass with a forward of its own, or
            a layer in one that is replicated, or one of an adapter (LoRA); a tied parameter would be cut in two
            ways, or in one of its layers; `sizes` that do not fit. The module is then as it was.
        MismatchError: the ranks' modules or arguments differ; the error names the parameters. The module is as it was.

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
    places = dict[nn.Module, list[str]]()
    for name, each in module.named_modules(remove_duplicate=False):
        places.setdefault(each, []).append(name)
    try:
        made = _layers(module, places, styles, axis, here, sequence_dim, rows, sizes or {})
    except ArgumentError as error:
        withdraw("nn.tensor_parallel", here, None, error)
        raise
    words = f"tensor_parallel({dict(styles)}, {sequence_dim=}, {rows=}, {sizes=})"
    _see_the_same_start(module, here, words)
    # Nothing was changed until here, so that what is refused is left as it was.
    for each, new in made.items():
        for name in places[each]:
            room, _, last = name.rpartition(".")
            setattr(module.get_submodule(room), last, new)
            for around in _around(module, name):
                _without_fast_path(around)
    return module


def _layers(
    module: nn.Module,
    places: dict[nn.Module, list[str]],
    styles: Mapping[str, Style],
    axis: AxisLike,
    here: Axis,
    sequence_dim: int | None,
    rows: Rows,
    sizes: Mapping[str, Sequence[int]],
) -> dict[nn.Module, nn.Module]:
    """The parallel layer for each one that the patterns name."""
    if unknown := [pattern for pattern in sizes if styles.get(pattern, "replicated") == "replicated"]:
        _refuse(
            here,
            "sizes are given for what is not cut",
            f"patterns of styles, other than of replicated ones: {', '.join(map(repr, styles))}",
            ", ".join(map(repr, unknown)),
            "use the same pattern in styles and in sizes",
        )
    chosen = _chosen(module, places, styles, axis, here)
    made, tied = dict[nn.Module, nn.Module](), dict[int, tuple[nn.Parameter, object]]()
    for each, pattern in chosen.items():
        name = places[each][0]
        new = made[each] = _made(each, styles[pattern], axis, sequence_dim, rows, sizes.get(pattern))
        new.training = each.training
        if isinstance(new, Parallel):
            new.path = name
            _tie(new, dict(each.named_parameters(recurse=False)), tied, here, name)
    for each, (name, *_) in places.items():
        own = () if isinstance(made.get(each), Parallel) else each.named_parameters(recurse=False)
        if any(id(parameter) in tied for _, parameter in own):
            _refuse(
                here,
                f"a parameter of {name or 'the module itself'!r} is tied to one that is to be cut",
                "both layers cut alike",
                ", ".join(styles),
                "name both in the same call, or untie them",
            )
    return made


def _without_fast_path(around: nn.Module) -> None:
    """Turn off torch's own path of evaluation, which reads the weights of the layers in it without calling them."""
    if isinstance(around, nn.TransformerEncoderLayer):
        around.activation_relu_or_gelu = 0
    elif isinstance(around, nn.TransformerEncoder):
        around.use_nested_tensor = False


def _see_the_same_start(module: nn.Module, here: Axis, words: str) -> None:
    """Compare the parameters that every rank has, by a number made of the bits of each."""
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
    said = f"{words} of {len(shapes)} parameters, names and shapes number {number}"
    own = torch.tensor([checksum(each.detach()) for each in compared.values()], device=meeting(here))
    with torch.no_grad():
        rows: Tensor = all_gather(Packed(own.unsqueeze(0), said), here)  # type: ignore[call-overload]
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
                expected="the dense module's values on every rank, of which each takes its part",
                got=f"other values of {', '.join(differing[:5])}{more} on rank {', '.join(others)} than on rank 0",
                remedy="make the module after torch.manual_seed(SEED) on every rank, load one checkpoint, or "
                "gradmesh.broadcast the parameters; mark shards made by hand with gradmesh.nn.mark_sharded first",
            )
        )


def _chosen(
    module: nn.Module,
    places: dict[nn.Module, list[str]],
    styles: Mapping[str, Style],
    axis: AxisLike,
    here: object,
) -> dict[nn.Module, str]:
    """The layers that the patterns name, each once, and its pattern."""
    unused, chosen = dict.fromkeys(styles), dict[nn.Module, str]()
    for each, names in places.items():
        fitting = (next((one for one in styles if fnmatchcase(name, one)), None) for name in names)
        patterns = [pattern for pattern in fitting if pattern is not None]
        if not patterns or isinstance(each, Parallel | Replicated):
            continue
        for pattern in patterns:
            unused.pop(pattern, None)
        name, style = names[0], styles[patterns[0]]
        if any(styles[pattern] != style for pattern in patterns):
            got = ", ".join(f"{pattern!r}: {styles[pattern]!r}" for pattern in patterns)
            _refuse(
                here, f"{name!r} is one layer with two names", "one style", got, "give both names the same"
            )
        around = _around(module, name)
        if why := _unfit(each, style, around):
            _refuse(
                here,
                f"{name or 'the module itself'!r} cannot be made parallel in this way: {why}",
                "the name of a module in it, of the kind that its style is for: "
                + ", ".join(f"{kind!r} {of.__name__}" for kind, of in _DENSE.items()),
                f"{patterns[0]!r}: {style!r} for {type(each).__name__} {name!r}",
                "make the module parallel without adapters, or merge them first"
                if "adapter" in why
                else "name the layers by a pattern that fits no others",
            )
        within = [
            outer
            for other in names
            for outer in _around(module, other)
            if outer in chosen or (isinstance(outer, Parallel | Replicated) and outer.over == axis)
        ]
        if within and style != "replicated":
            _refuse(
                here,
                f"{name!r} lies in a module whose parameters are replicated over the same ranks",
                "layers beside each other",
                f"{patterns[0]!r}: {style!r}",
                "replicate the modules around it one by one",
            )
        if not within:  # else the one around it replicates it too
            chosen[each] = patterns[0]
    if unused:
        _refuse(
            here,
            "a pattern fits no module",
            "names as in named_modules: " + ", ".join(name for name, _ in module.named_modules() if name),
            ", ".join(map(repr, unused)),
            "mend the pattern, or leave it out",
        )
    return chosen


def _around(module: nn.Module, name: str) -> list[nn.Module]:
    """The modules in which the one of this name lies, from the outermost."""
    steps = name.split(".") if name else []
    return [module.get_submodule(".".join(steps[:depth])) for depth in range(len(steps))]


def _unfit(each: nn.Module, style: str, around: list[nn.Module]) -> str:
    """Why a layer cannot be made parallel in a style."""
    kind = _DENSE.get(style)
    if _is_adapter(each) and style != "replicated":
        return "it is an adapter (LoRA) around the layer, whose own weights would stay whole"
    if around and _is_adapter(around[-1]):
        return "an adapter (LoRA) is around it, whose own weights would stay whole"
    if around and kind is nn.Linear and is_conv1d(each):
        return ""
    if kind is None or not around or not isinstance(each, kind):
        return "it is of another kind"
    if isinstance(around[-1], nn.MultiheadAttention):
        return "the attention around it reads its weights without calling it"
    if kind is not nn.Module and type(each).forward is not kind.forward:
        return "its class has a forward of its own"
    if kind is not nn.Module and "weight" not in dict(each.named_parameters(recurse=False)):
        return "its weight is made of other parameters"
    return ""


def _is_adapter(each: nn.Module) -> bool:
    """Whether it is a layer of peft: one that adds low-rank weights of its own to the layer that it wraps."""
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
