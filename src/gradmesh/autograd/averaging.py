"""Gradient averaging by DDP and FSDP: which parameters are averaged, and the scale factor that each gradient needs.

A wrapper divides the sum over its ranks by their number, and `gradmesh.objective` multiplies the loss by that number.
This is right for a parameter that the wrapper averages. It is wrong for one that no wrapper averages, such as an
expert's, and for one whose gradient a verb already sums over the same ranks (`gradmesh.replicate`): the average of
equal sums is that sum. So `Averaging.correct` walks the graph of the loss to its parameters. Where another factor is
needed, gradients are scaled in the backward passes of this loss: at the input of a summing verb, or at the edge to a
parameter.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeAlias
from weakref import WeakSet, ref

import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradmesh._torch import LastPass, only_others_compile, transforms_active
from gradmesh._torch.fsdp import flat_parameters, fully_sharded, ignored_by_fsdp, is_replicated
from gradmesh._util.call_sites import show_site
from gradmesh.autograd.traced import Traced
from gradmesh.errors import ArgumentError, CheckWarning, message
from gradmesh.ops.base import LinearOp
from gradmesh.runtime.checking import FULL
from gradmesh.runtime.mesh import Axis, resolve
from gradmesh.runtime.state import check_level
from gradmesh.transport import compiling
from gradmesh.types import I

_PASS_A_NUMBER = "pass the number of ranks that gradients are averaged over, such as ddp=8"
_METADATA = "gradmesh.objective"


def instances_of(*kinds: type) -> list[Any]:
    """The objects of these classes and their subclasses.

    Not by `gc.get_objects`: its list holds the tuples that other threads are making, which CPython then cannot resize
    (SystemError: bad argument to internal function).
    """
    classes = list(kinds)
    for each in classes:  # which grows meanwhile
        classes += each.__subclasses__()
    # type() instead of isinstance, as objects may override __class__.
    return [each for each in gc.get_referrers(*classes) if issubclass(type(each), kinds)]


_FROZEN_BY_PYTHON = 2000
"""More objects than Python freezes itself, some hundred in 3.12; a program that has imported torch freezes more."""


class Averaged(NamedTuple):
    """How a wrapper averages one parameter's gradient: the divisor, and the group or mesh."""

    divisor: float
    over: dist.ProcessGroup | DeviceMesh | None

    @property
    def ranks(self) -> frozenset[int]:
        """The global ranks."""
        if isinstance(self.over, DeviceMesh):
            return frozenset(self.over.mesh.flatten().tolist())
        return frozenset(() if self.over is None else dist.get_process_group_ranks(self.over))


_NOT_AVERAGED = Averaged(1, None)
"""A parameter that is not averaged."""


End: TypeAlias = tuple[Any, int, nn.Parameter, Averaged]
"""An edge to a parameter: the node before it, the edge's index there, the parameter, and how it is averaged."""
Crossed: TypeAlias = frozenset[tuple[frozenset[int], int]]
"""The summing verbs on a path from the loss: their ranks, and how many of these a wrapper averages over."""
_NOTHING: Crossed = frozenset()


@dataclass
class Averaging:
    """How gradients are averaged after backward."""

    divisor: float  # the divisor of most gradients, by which the loss is multiplied; 1: they are not averaged
    axis: Axis  # the ranks that the loss is over
    module: nn.Module | None = None  # the `ddp` argument, if it is a module
    # the parameters that wrappers in the module average, by identity
    wrapped: dict[int, Averaged] = field(default_factory=dict)

    def correct(self, loss: Tensor) -> LastPass | None:
        """Register hooks that give each parameter behind the loss its factor.

        Returns:
            A hook for the returned loss that marks the backward passes in which gradients are scaled; None if no
            gradient needs another factor.

        Raises:
            ArgumentError: no factor is right for a parameter, or the graph does not show it.
        """
        if (compiling() and not only_others_compile()) or transforms_active():
            self._refuse_uneven()
            return None
        if loss.grad_fn is None:
            return None
        if self.module is None:
            if self.divisor != 1 and check_level() == FULL:
                self._warn_of_unwrapped(loss)
            return None
        if not self.wrapped:
            return None
        graph = Graph(loss.grad_fn)
        # Leaves that are activations are skipped: their gradients are used elsewhere.
        ends = [
            (node, index, leaf, self._averaging_of(leaf))
            for node, index, leaf in graph.edges
            if isinstance(leaf, nn.Parameter)
        ]
        incoming: dict[Any, float] = {}
        crossed = self._cross(graph, ends, incoming) if graph.ops else {}
        outgoing: dict[Any, dict[int, float]] = {}
        for node, index, leaf, averaged in ends:
            self._check_invisible(node, leaf, averaged)
            # An averaged parameter needs the same factor on every path.
            ways = crossed.get(node, {_NOTHING}) if averaged is _NOT_AVERAGED else {_NOTHING}
            factors = {averaged.divisor / self.divisor * math.prod(n for _, n in way) for way in ways}
            if len(factors) > 1:
                self._refuse_both_ways(self._name(leaf))
            (factor,) = factors
            if factor != 1:
                outgoing.setdefault(node, {})[index] = factor
        for node in graph.hiding:
            self._check_hidden(node)
        if not incoming and not outgoing:
            return None
        hook = LastPass()
        for node in dict.fromkeys([*incoming, *outgoing]):
            self._scale(node, incoming.get(node, 1.0), outgoing.get(node, {}), hook)
        return hook

    def _cross(self, graph: Graph, ends: list[End], incoming: dict[Any, float]) -> dict[Any, set[Crossed]]:
        """For each node, the summing verbs on each path from the loss to its outputs.

        Stores the factor for the incoming gradient of each verb that needs one in `incoming`.
        """
        found: dict[Any, set[Crossed]] = {}
        for node, ways in graph.downwards(found):
            op = graph.ops.get(node)
            if op is None:
                continue
            ranks = frozenset(op.axis.global_ranks)
            # How many of the op's ranks the parameters behind the node are averaged over.
            counts = {
                averaged.over: len(ranks & averaged.ranks)
                for *_, averaged in ends
                if averaged.over is not None
            }
            if len(set(counts.values())) > 1:
                below = graph.below(node)
                counts = {
                    averaged.over: counts[averaged.over]
                    for end, _, _, averaged in ends
                    if averaged.over in counts and end in below
                }
            amounts = set(counts.values())
            if len(amounts) > 1:
                self._refuse(
                    f"{op.verb} on axis {op.axis} {_place(node)}, whose parameters are averaged over "
                    f"{' and '.join(map(str, sorted(amounts)))} of its ranks",
                    "one call per group of parameters that are averaged over the same ranks",
                    "call the verb separately for each group of parameters",
                )
            n = amounts.pop() if amounts else 1
            if n == 1:
                continue
            if op.dst is not I:
                incoming[node] = 1 / n
                found[node] = {way | {(ranks, n)} for way in ways}
            elif all((ranks, n) in way for way in ways):
                incoming[node] = float(n)
                found[node] = {way - {(ranks, n)} for way in ways}
            elif any((ranks, n) in way for way in ways):
                self._refuse_both_ways(f"what {op.verb} made on axis {op.axis} {_place(node)}")
            else:
                _warn_of_unpaired(op, node)
        return found

    def _refuse_both_ways(self, what: str) -> NoReturn:
        self._refuse(
            f"{what}, whose gradient is summed by replicate on one path but not on another",
            "a gradient that is summed over the ranks on every path, or on no path",
            "on this rank, use the result of replicate(p) everywhere instead of p, or nowhere",
        )

    def _averaging_of(self, leaf: Tensor) -> Averaged:
        """How a parameter is averaged."""
        if (found := self.wrapped.get(id(leaf))) is not None:
            return found
        if self._names.get(id(leaf)) is not None:
            return _NOT_AVERAGED
        elsewhere = self.elsewhere(leaf)
        if elsewhere is None and gc.get_freeze_count() > _FROZEN_BY_PYTHON:
            self._refuse(
                f"{self._name(leaf)}, which is not in the `ddp` module; after gc.freeze() other wrappers cannot be "
                "found",
                "a `ddp` module that contains all parameters of the loss",
                "pass ddp=torch.nn.ModuleList([wrapped_model, other_module])",
            )
        return elsewhere or _NOT_AVERAGED

    def elsewhere(self, leaf: Tensor) -> Averaged | None:
        """How any wrapper of this process averages a parameter outside of the module; None: no wrapper does."""
        if type(leaf).__name__ == "FlatParameter":  # FSDP1, in a torch where its module cannot be found
            return Averaged(self.divisor, None)
        _count_wrappers()
        known = _known.get(id(leaf))
        if known is not None and known[0]() is leaf and known[2] == _wrappers_made[0]:
            return known[1]
        for key in [key for key, (there, *_) in _known.items() if there() is None]:
            _known.pop(key, None)
        made, found = _wrappers_made[0], self._everywhere.get(id(leaf))
        if found is None or found.over is not None:  # not a divisor that is assumed here
            _known[id(leaf)] = ref(leaf), found, made
        return found

    @functools.cached_property
    def _everywhere(self) -> dict[int, Averaged]:
        """All averaged parameters of this process."""
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        kinds = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
        found: dict[int, Averaged] = {}
        for each in instances_of(DistributedDataParallel, *kinds):
            try:
                found |= _averaged_by(each, self.axis)
            except AttributeError:  # a partially constructed wrapper
                continue
            except ArgumentError:  # unknown divisor: assume that of the others
                found |= {id(p): Averaged(self.divisor, None) for p in each.parameters()}
        return found

    @functools.cached_property
    def _names(self) -> dict[int, str]:
        """The names of the module's parameters."""
        return {} if self.module is None else {id(p): name for name, p in self.module.named_parameters()}

    def _name(self, leaf: Tensor) -> str:
        return f"parameter {self._names.get(id(leaf), '')} of shape {list(leaf.shape)}".replace("  ", " ")

    def _refuse_uneven(self) -> None:
        """Raise for parameters that need different factors where the graph of the loss is not visible."""
        if self.module is None or not self.wrapped:
            return
        parameters = self.module.named_parameters()
        outside = [name for name, p in parameters if p.requires_grad and id(p) not in self.wrapped]
        numbers = {each.divisor for each in self.wrapped.values()}
        if outside or len(numbers) > 1:
            self._refuse(
                f"parameters outside of the wrapper: {', '.join(outside[:3])}"
                if outside
                else f"gradients divided by {' and '.join(f'{n:g}' for n in sorted(numbers))}",
                "one factor for all parameters inside torch.compile or a torch.func transform",
                "call gradmesh.objective outside of the compiled function or the torch.func transform",
            )

    def _summed_by_layers(self, module: nn.Module, averaged: Averaged) -> Iterator[nn.Module]:
        """The layers in a module that sum their own parameters' gradients over ranks that a wrapper averages over."""
        for part in module.modules():
            if getattr(part, "replicated", False) is True and hasattr(part, "over"):
                given: Any = part.over
                for over in given if isinstance(given, tuple) else (given,):
                    if len(averaged.ranks.intersection(resolve(over, "objective").global_ranks)) > 1:
                        yield part

    def _check_invisible(self, node: Any, leaf: Tensor, averaged: Averaged) -> None:
        """Raise for a compiled layer that sums the gradient of a parameter that is averaged too."""
        if self.module is None or type(node).__name__ != "CompiledFunctionBackward" or averaged.over is None:
            return
        for layer in self._summed_by_layers(self.module, averaged):
            if any(p is leaf for p in layer.parameters()):
                self._refuse(
                    f"{self._name(leaf)} of a compiled {type(layer).__name__}, which sums its gradient itself",
                    "layers that sum their gradients outside of compiled regions",
                    "exclude the layer from torch.compile, or pass replicated=False if the layer has that argument",
                )

    def _check_hidden(self, node: Any) -> None:
        """Raise for a reentrant checkpoint with a parameter that needs another factor."""
        for held in _tensors_in(getattr(node, "run_function", None)):
            inside = list(held.parameters()) if isinstance(held, nn.Module) else [held]
            for parameter in inside:
                if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
                    averaged = self._averaging_of(parameter)
                    if averaged.divisor != self.divisor:
                        self._refuse(
                            f"{self._name(parameter)} inside a reentrant checkpoint, averaged by another divisor, "
                            f"{averaged.divisor:g} instead of {self.divisor:g}",
                            "such parameters outside of reentrant checkpoints, which hide them from autograd",
                            "call torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)",
                        )
                    if isinstance(held, nn.Module) and averaged.over is not None:
                        for layer in self._summed_by_layers(held, averaged):
                            self._refuse(
                                f"{type(layer).__name__} inside a reentrant checkpoint, which sums its gradients over "
                                "ranks that the wrapper averages over",
                                "such layers outside of reentrant checkpoints, which hide them from autograd",
                                "call torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)",
                            )

    def _scale(self, node: Any, incoming: float, outgoing: dict[int, float], hook: LastPass) -> None:
        """Scale the incoming gradient of a node, and some of its outgoing ones, in the passes of a loss."""
        if outgoing and hasattr(node, "op"):
            # The incoming gradient of a verb, as `no_sync` may defer it.
            incoming, outgoing = incoming * outgoing.pop(0), outgoing
        there = node.metadata.get(_METADATA)
        if there is not None and there[:2] == (incoming, outgoing):  # another loss of the same graph
            there[2].add(hook)
            return
        if there is not None:
            self._refuse(
                "two objectives of one graph with different factors for a parameter",
                "one factor for each parameter",
                "compute the second loss in a separate forward pass",
            )
        # A retained graph may have many losses, one in each step; each lives as long as its hook.
        passes = WeakSet([hook])
        node.metadata[_METADATA] = incoming, outgoing, passes

        def active() -> bool:
            return any(each.running for each in passes)

        def before(grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
            first, *others = grads
            return (first * incoming, *others) if first is not None and active() else None

        def behind(grads: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...] | None:
            scaled = (
                g if g is None or index not in outgoing else g * outgoing[index]
                for index, g in enumerate(grads)
            )
            return tuple(scaled) if active() else None

        if incoming != 1:
            node.register_prehook(before)
        if outgoing:
            node.register_hook(behind)

    def _warn_of_unwrapped(self, loss: Tensor) -> None:
        """Warn if only some of the parameters are averaged, but all get the factor."""
        leaves = {
            id(leaf): leaf for _, _, leaf in Graph(loss.grad_fn).edges if isinstance(leaf, nn.Parameter)
        }
        alone = [leaf for leaf in leaves.values() if id(leaf) not in self._everywhere]
        if alone and len(alone) < len(leaves):
            shapes = ", ".join(str(list(leaf.shape)) for leaf in alone[:3])
            text = message(
                "gradients of parameters that no wrapper averages are multiplied by the number of ranks",
                op="objective",
                axis=str(self.axis),
                expected="DDP or FSDP averages every parameter of the loss, as ddp=True states",
                got=f"{len(alone)} of {len(leaves)} parameters outside of wrappers, of shape {shapes}, with gradients "
                f"{self.divisor:g} times too large",
                remedy="pass the wrapped module, ddp=model, so that each parameter gets its own factor",
            )
            warnings.warn(text, CheckWarning, stacklevel=4)

    def _refuse(self, got: str, expected: str, remedy: str) -> NoReturn:
        _refuse(self.axis, got, remedy, expected)


def averaging(ddp: bool | float | nn.Module, axis: Axis) -> Averaging:
    """How gradients are averaged after backward, by the argument `ddp` of `gradmesh.objective`.

    Raises:
        ArgumentError: the number of ranks cannot be determined.
    """
    if isinstance(ddp, bool):
        return Averaging(axis.size if ddp else 1, axis)
    if isinstance(ddp, (int, float)):
        if not ddp > 0:
            _refuse(axis, f"ddp={ddp}", _PASS_A_NUMBER)
        return Averaging(ddp, axis)
    if not isinstance(ddp, nn.Module):
        _refuse(axis, f"ddp={ddp!r}", "pass the wrapped module, or True")
    wrapped: dict[int, Averaged] = {}
    for part in ddp.modules():
        wrapped |= _averaged_by(part, axis)
    return Averaging(max((each.divisor for each in wrapped.values()), default=1), axis, ddp, wrapped)


def _averaged_by(part: nn.Module, axis: Axis) -> dict[int, Averaged]:
    """The averaged parameters of a module, if it is itself a wrapper."""
    # Not imported here, as that takes as long as importing torch.distributed.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if isinstance(part, DistributedDataParallel):
        left_out = {id(p) for name, p in part.module.named_parameters() if name in part.parameters_to_ignore}
        return _all_of(part, left_out)
    if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
        if "HYBRID" in part.sharding_strategy.name:
            _refuse(
                axis,
                f"FSDP with {part.sharding_strategy.name}, which averages over two groups",
                "pass the number of ranks of both groups together, such as ddp=8 for 2 x 4 ranks",
            )
        return _all_of(part, ignored_by_fsdp(part)) | {
            id(flat): Averaged(part.process_group.size(), part.process_group)
            for flat in flat_parameters(part)
        }
    if fsdp is not None and isinstance(part, fsdp.FSDPModule):
        return {key: Averaged(*averaged) for key, averaged in fully_sharded(part).items()}
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(part).__mro__):
        _refuse(
            axis,
            "an engine of DeepSpeed, which averages gradients itself, over its data-parallel ranks",
            "pass ddp=True if the axis has these ranks, else their number, such as ddp=8",
        )
    if is_replicated(part):
        _refuse(axis, "a module with torch's replicate(), which does not expose its divisor", _PASS_A_NUMBER)
    return {}


def _all_of(part: Any, left_out: set[int]) -> dict[int, Averaged]:
    averaged = Averaged(part.process_group.size(), part.process_group)
    return {id(p): averaged for p in part.parameters() if p.requires_grad and id(p) not in left_out}


_known: dict[int, tuple[ref[Tensor], Averaged | None, int]] = {}
"""Cache of how parameters outside of `ddp` are averaged; a lookup visits every object of the process.

The int is the number of DDP modules created so far; an entry is invalid if there are new ones.
"""

_wrappers_made = [0]


@functools.cache
def _count_wrappers() -> None:
    """Count new DDP modules; FSDP creates new parameters, which are looked up."""

    def registered(module: nn.Module, name: str, _: nn.Module | None) -> None:
        if isinstance(module, DistributedDataParallel) and name == "module":
            _wrappers_made[0] += 1

    register_module_module_registration_hook(registered)


_warned: set[Any] = set()


def _warn_of_unpaired(op: LinearOp, node: Any) -> None:
    """Warn once per source line if averaged parameters get gradients through dst=gm.I over the same ranks."""
    site = node.call.site if hasattr(node, "call") else None
    if site in _warned:
        return
    _warned.add(site)
    text = message(
        "the loss differs between ranks, but its gradient passes a collective with dst=gm.I to averaged parameters, "
        "so their gradients are too small by the number of ranks",
        op="objective",
        axis=str(op.axis),
        expected="dst=gm.R where ranks use the result differently",
        got=f"{op.verb} with dst=gm.I {show_site(site)}",
        remedy="pass dst=gm.R there, or wrap its result, gradmesh.replicate(y)",
    )
    place = ("<unknown>", 0) if site is None else (site[0].co_filename, site[1])
    warnings.warn_explicit(text, CheckWarning, *place)


# ---- the graph of a loss


class Graph:
    """The graph of a loss."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._nodes = {root}
        # each edge to a leaf: the node before it, its index among the node's edges, and the leaf
        self.edges: list[tuple[Any, int, Tensor]] = []
        self.hiding: list[Any] = []  # nodes of reentrant checkpoints, which create their graphs in backward
        self.ops: dict[Any, LinearOp] = {}  # the nodes of verbs with an I operand or result
        nodes, stack = self._nodes, [root]
        while stack:
            node = stack.pop()
            if isinstance(node, BackwardCFunction):
                op = getattr(node, "op", None)
                op = op.op if isinstance(op, Traced) else op
                op = op if isinstance(op, LinearOp) and hasattr(op, "axis") else None
                if op is not None and op.axis.size > 1 and I in (op.src, op.dst):
                    self.ops[node] = op
                elif type(node).__name__ == "CheckpointFunctionBackward":
                    self.hiding.append(node)
            for index, (after, _) in enumerate(node.next_functions):
                if after in nodes or after is None:
                    continue
                if type(after).__name__ == "AccumulateGrad":
                    self.edges.append((node, index, after.variable))
                else:
                    nodes.add(after)
                    stack.append(after)

    def downwards(self, found: dict[Any, set[Crossed]]) -> Iterator[tuple[Any, set[Crossed]]]:
        """Each node in topological order, with the summing verbs on each path from the loss.

        They are stored in `found`, which the caller may change between nodes.
        """
        before = Counter(after for node in self._nodes for after, _ in node.next_functions)
        found.update({node: set() for node in self._nodes})
        found[self._root].add(_NOTHING)
        ready = [self._root]
        while ready:
            node = ready.pop()
            yield node, found[node]
            for after, _ in node.next_functions:
                if after in found:
                    found[after] |= found[node]
                    before[after] -= 1
                    if not before[after]:
                        ready.append(after)

    def below(self, node: Any) -> set[Any]:
        """A node and its descendants."""
        found, stack = {node}, [node]
        while stack:
            for after, _ in stack.pop().next_functions:
                if after in self._nodes and after not in found:
                    found.add(after)
                    stack.append(after)
        return found


def _place(node: Any) -> str:
    return show_site(node.call.site if hasattr(node, "call") else None)


def _tensors_in(what: object, deep: int = 0) -> Iterator[nn.Module | Tensor]:
    """The modules and tensors that a function references."""
    if isinstance(what, (nn.Module, Tensor)):
        yield what
        return
    inside: list[object] = []
    if isinstance(what, functools.partial):
        inside = [what.func, *what.args, *what.keywords.values()]
    elif isinstance(what, (list, tuple)):
        inside = list(what)
    elif isinstance(what, dict):
        inside = list(what.values())
    elif callable(what):
        inside = [getattr(what, "__self__", None), *(getattr(what, "__defaults__", None) or ())]
        for cell in getattr(what, "__closure__", None) or ():
            try:
                inside.append(cell.cell_contents)
            except ValueError:  # an empty cell
                continue
    if deep < 4:
        for each in inside:
            yield from _tensors_in(each, deep + 1)


def _refuse(
    axis: Axis,
    got: str,
    remedy: str,
    expected: str = "a module whose gradients DDP or FSDP averages, True, False, or a number of ranks",
) -> NoReturn:
    raise ArgumentError.of(
        "cannot determine how many ranks gradients are averaged over",
        op="objective",
        axis=str(axis),
        expected=expected,
        got=got,
        remedy=remedy,
    )
