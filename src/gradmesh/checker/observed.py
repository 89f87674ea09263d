"""What a program does beside operators that gradients pass through: samplers, handles, what a step makes of shards."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler, Subset

from gradmesh._torch import functorch_active, is_fake
from gradmesh._torch.operators import arguments, local_part, written
from gradmesh._util.call_sites import is_of_the_program
from gradmesh._util.structure import tensors_in
from gradmesh.checker.trace import Annotation, Epoch, Tape, Unwaited, address_of, end_of, gradient_of
from gradmesh.type_inference.tracker import memory_of


@contextlib.contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of modules and classes have other values in here: each with what has it, and its name."""
    before = [(holder, name, vars(holder)[name]) for holder, name, _ in changes]
    try:
        for holder, name, value in changes:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)


class Samplers:
    """Records which samples each `DistributedSampler` gives its rank in each epoch.

    `again` is called when a sampler begins its second epoch.
    """

    def __init__(self, tape: Tape, site: Callable[[], int], again: Callable[[], None]) -> None:
        self._tape, self._site, self._again = tape, site, again
        self._known: WeakKeyDictionary[Any, tuple[int, list[bool]]] = WeakKeyDictionary()

    def watched(self) -> AbstractContextManager[None]:
        """Replace the methods of samplers."""
        sets = DistributedSampler.set_epoch

        @functools.wraps(sets)
        def set_epoch(sampler: Any, epoch: int) -> None:
            self._of(sampler)[1].append(True)
            sets(sampler, epoch)

        iterates = self._iterates(DistributedSampler.__iter__)
        return replaced(
            (DistributedSampler, "__iter__", iterates), (DistributedSampler, "set_epoch", set_epoch)
        )

    def _of(self, sampler: Any) -> tuple[int, list[bool]]:
        return self._known.setdefault(sampler, (len(self._known), []))

    def _iterates(self, original: Any) -> Any:
        @functools.wraps(original)
        def begins(sampler: Any) -> Iterator[int]:
            own = list(original(sampler))
            number, is_set = self._of(sampler)
            found, data = own, sampler.dataset
            while isinstance(data, Subset):
                found, data = [int(data.indices[at]) for at in found], data.dataset
            shuffle, seed = bool(sampler.shuffle), (int(sampler.seed), int(sampler.epoch))
            padding = 0 if sampler.drop_last else int(sampler.total_size) - len(sampler.dataset)
            self._tape.epochs.append(
                Epoch(
                    number, self._site(), len(data), sampler.num_replicas, sampler.rank,
                    shuffle, bool(is_set), seed, padding, found,
                )
            )  # fmt: skip
            if sum(each.sampler == number for each in self._tape.epochs) > 1:
                self._again()
            return iter(own)

        return begins


_STARTED = (
    "all_reduce",
    "reduce",
    "all_gather_into_tensor",
    "all_gather",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
)
"""Calls that may return before their first argument has its values."""


@contextlib.contextmanager
def annotated(
    tape: Tape, site: Callable[[], int], unseen: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Record what `spmd_types.assert_type` says of tensors, if it is installed."""
    spec = importlib.util.find_spec("spmd_types")
    if spec is None or not any(
        Path(each, "runtime.py").exists() for each in spec.submodule_search_locations or ()
    ):
        yield
        return
    try:
        spmd: Any = importlib.import_module("spmd_types")
    except Exception:  # another torch than it is made for; a program that uses it says so itself
        yield
        return
    original, hook = spmd.assert_type, Tensor.register_hook

    def note(x: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
        if functorch_active() or is_fake(x) or x.layout is not torch.strided or not dist.is_initialized():
            return
        world, types = dist.get_world_size(), {}
        known = {spmd.normalize_axis(group): dist.get_process_group_ranks(group) for group in groups}
        for axis, kind in spmd.get_local_type(x).items():
            ranks = known.get(axis) or next(
                each for each in axis.layout.global_ranks(world) if tape.rank in each
            )
            types[tuple(ranks)] = kind.name
        made = Annotation(site(), types, _numbers(x), of=x.detach())
        tape.annotations.append(made)

        def arrives(gradient: Tensor) -> None:
            with unseen():
                made.gradient = gradient.detach().clone() if made.gradient is None else made.gradient

        if x.requires_grad:
            hook(x, arrives)  # type: ignore[no-untyped-call]

    @functools.wraps(original)
    def assert_type(tensor: Any, *types: Any, **kwargs: Any) -> Any:
        result = original(tensor, *types, **kwargs)
        keys = [key for each in types if isinstance(each, Mapping) for key in each]
        with unseen():
            for x in tensors_in(result):
                note(x, [key for key in keys if isinstance(key, dist.ProcessGroup)])
        return result

    places = spmd, importlib.import_module("spmd_types.runtime")
    with replaced(*((place, "assert_type", assert_type) for place in places)):
        yield


def forget_overwritten(tape: Tape) -> None:
    """Drop the value of what was annotated before it was written, such as the result of a collective."""
    for each in tape.annotations:
        x, each.of = each.of, None
        if x is not None and each.value is not None:
            same = torch.equal(_numbers(x).nan_to_num(), each.value.nan_to_num())
            each.value = each.value if same else None


def _numbers(x: Tensor) -> Tensor:
    x = x.detach()
    plain = (x.is_floating_point() and x.dtype.itemsize > 1) or x.is_complex()
    return x.clone() if plain else x.double()


class Handles:
    """Records results of asynchronous calls that are used before the call is waited for.

    A wait for a later call of the same group counts as a wait for this one, as calls of one NCCL stream end in order;
    but not of a group that the program itself gives Gloo, which runs calls in several threads.
    """

    def __init__(self, tape: Tape, site: Callable[[], int]) -> None:
        self._tape, self._site = tape, site
        self.pending: dict[int, tuple[Any, Any, str, int, list[Tensor]]] = {}
        self.in_order = True
        """Whether the program asked for a backend whose calls end in order."""

    def watched(self) -> AbstractContextManager[None]:
        """Replace the functions that start calls, and the methods that wait for them."""
        functions = (*_STARTED, "barrier")
        methods = ("wait", "is_completed", "get_future", "synchronize")
        return replaced(
            *((dist, name, self._starts(name, getattr(dist, name))) for name in functions),
            *((dist.Work, name, self._waits(getattr(dist.Work, name))) for name in methods),
        )

    def _starts(self, name: str, original: Any) -> Any:
        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            work = original(*args, **kwargs)
            group = next(
                (x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup)), dist.group.WORLD
            )
            if isinstance(work, dist.Work) and is_of_the_program(sys._getframe(1).f_code.co_filename):
                outs = list(tensors_in(args[:1] or tuple(kwargs.values())[:1]))
                self.pending[id(work)] = work, group, name, self._site(), outs
            elif work is None and self.in_order:
                self._over(group)
            return work

        return start

    def _waits(self, original: Any) -> Any:
        @functools.wraps(original)
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            entry = self.pending.get(id(work))
            if entry is not None:
                self._over(entry[1], last=id(work))
            return original(work, *args, **kwargs)

        return wait

    def _over(self, group: Any, last: int | None = None) -> None:
        """The calls of a group up to one are over."""
        if not self.in_order:
            self.pending.pop(last, None)  # type: ignore[arg-type]
            return
        for key in [key for key, entry in self.pending.items() if entry[1] is group]:
            del self.pending[key]
            if key == last:
                return

    def used(self, tensors: Sequence[Tensor], subject: str = "") -> None:
        """Tensors are read or written."""
        for key, (_, _, name, site, outs) in list(self.pending.items()):
            if any(_overlap(x, y) for x in tensors for y in outs):
                del self.pending[key]
                self._tape.unwaited.append(Unwaited(name, site, self._site(), subject))


def _overlap(x: Tensor, y: Tensor) -> bool:
    if x.numel() == 0 or y.numel() == 0 or not address_of(x) or not address_of(y):
        return False
    return address_of(x) < end_of(y) and address_of(y) < end_of(x)


class Mixing:
    """Finds what a step makes of a whole tensor, such as its norm, and moves its entries by."""

    def __init__(self, site: Callable[[], int]) -> None:
        self._site = site
        self.mixed: dict[int, tuple[str, int]] = {}
        self._own: dict[int, frozenset[int]] = {}
        self._made: dict[int, tuple[str, int]] = {}
        self._params: dict[int, int] = {}
        self._read: dict[int, tuple[str, int]] = {}

    def begins(self, held: Sequence[Any], states: Any) -> None:
        """A step begins: the parameters with what their optimizer keeps for each."""
        self.mixed, self._made, self._read, self._own = {}, {}, {}, {}
        self._params = {memory_of(local_part(p)): at for at, p in enumerate(held)}
        for at, p in enumerate(held):
            state = states.get(p, {})
            kept = [x for x in state.values() if isinstance(x, Tensor)] if isinstance(state, dict) else []
            for x in (p, gradient_of(p), *kept):
                if x is not None and x.numel() > 1:
                    key = memory_of(local_part(x))
                    self._own[key] = self._own.get(key, frozenset()) | {at}

    def follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator of a step."""
        name = func.overloadpacket.__name__
        each, plain = name.startswith("_foreach_"), name.removeprefix("_foreach_").rstrip("_")
        lists = [list(tensors_in(x)) for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
        lists = [x for x in lists if x]
        rows = list(zip(*lists, strict=False)) if each and lists else [tuple(tensors_in((args, kwargs)))]
        found = [self._of(plain, row) for row in rows]
        result = func(*args, **kwargs)
        keys = written(func)
        bound = arguments(func, args, kwargs) if keys else {}
        targets = [x for key in keys for x in tensors_in(bound.get(key))]
        for at, x in enumerate(targets or tensors_in(result)):
            own, made = found[at] if each and at < len(found) else found[0]
            key = memory_of(x)
            if own or not targets:
                self._own[key] = own
            if made is not None:
                self._made[key] = made
            elif not targets:
                self._made.pop(key, None)
            index = self._params.get(key) if targets else None
            if index is not None and (made := made or self._read.get(index)) is not None:
                self.mixed.setdefault(index, made)
        if plain == "_local_scalar_dense" and found[0][1] is not None:
            self._read.update(dict.fromkeys(found[0][0], found[0][1]))
        return result

    def _of(self, name: str, row: Sequence[Tensor]) -> tuple[frozenset[int], tuple[str, int] | None]:
        """The parameters that some tensors come from, and the operator that mixes their entries, with its line."""
        own = frozenset[int]().union(*(self._own.get(memory_of(x), ()) for x in row))
        made = next((self._made[key] for key in map(memory_of, row) if key in self._made), None)
        if made is None and name in _MIXES and any(x.numel() > 1 and memory_of(x) in self._own for x in row):
            made = name, self._site()
        return own, made


_MIXES = {
    *("sum", "mean", "norm", "linalg_vector_norm", "linalg_matrix_norm", "dot", "vdot", "mm", "bmm", "addmm", "mv"),
    *("max", "amax", "min", "amin", "aminmax", "var", "std", "median", "kthvalue", "topk", "sort", "cumsum", "baddbmm"),
    *("_linalg_svd", "linalg_qr", "_linalg_eigh", "linalg_inv_ex", "linalg_cholesky_ex", "geqrf"),
}  # fmt: skip
"""Operators whose result has something of many entries."""
