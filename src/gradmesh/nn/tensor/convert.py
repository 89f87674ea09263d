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
        The module. Parameters that were tied still are, if they are cut alike, and a layer with two names is one
        layer still. Hooks of the layers that were are not taken over.

    Raises:
        ArgumentError: a pattern fits no module, or one of another kind, as is a subclass with a forward of its own, or
            a layer in one that is replicated; a tied parameter would be cut in two ways, or in one of its layers. The
            module is then as it was.

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
    chosen = _chosen(module, places, styles, axis, here)
    made, tied = dict[nn.Module, nn.Module](), dict[int, tuple[nn.Parameter, object]]()
    for each, style in chosen.items():
        new = made[each] = _made(each, style, axis, sequence_dim, rows)
        new.training = each.training
        if isinstance(new, Parallel):
            _tie(new, dict(each.named_parameters(recurse=False)), tied, here, places[each][0])
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
    # Nothing was changed until here, so that what is refused is left as it was.
    for each, new in made.items():
        for name in places[each]:
            room, _, last = name.rpartition(".")
            around = module.get_submodule(room)
            setattr(around, last, new)
            if isinstance(around, nn.TransformerEncoderLayer):
                # In evaluation torch's layer would read the weights itself; it does not where there is a hook.
                new.register_forward_pre_hook(_nothing)
    return module


def _nothing(module: nn.Module, args: object) -> None:
    """A hook that does nothing."""


def _chosen(
    module: nn.Module,
    places: dict[nn.Module, list[str]],
    styles: Mapping[str, Style],
    axis: AxisLike,
    here: object,
) -> dict[nn.Module, str]:
    """The layers that the patterns name, each once, and what is to be made of them."""
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
                f"{patterns[0]!r}: {style!r} for {type(each).__name__}",
                "name the layers by a pattern that fits no others",
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
            chosen[each] = style
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
    if kind is None or not around or not isinstance(each, kind):
        return "it is of another kind"
    if isinstance(around[-1], nn.MultiheadAttention):
        return "the attention around it reads its weights without calling it"
    if kind is not nn.Module and type(each).forward is not kind.forward:
        return "its class has a forward of its own"
    if kind is not nn.Module and "weight" not in dict(each.named_parameters(recurse=False)):
        return "its weight is made of other parameters"
    return ""


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
