"""What each verb means: for the tensors of a group of ranks, one after another, the results; with torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from tools.attack.calls import BY_HAND, DERIVATIVES, VMAPS

NEAR = 1e-5
"""Values closer than this may be taken to tie on one side and not on the other, so that a program has none."""


class Invalid(Exception):  # noqa: N818 - not an error: the program is drawn again
    """This program is none that the verbs are meant for."""


def need(condition: object) -> None:
    """Refuse a program."""
    if not condition:
        raise Invalid


Params = dict[str, Any]
"""What a verb is called with on one rank."""


def _same_shapes(xs: Sequence[Tensor], but: int | None = None) -> None:
    shapes = [[n for dim, n in enumerate(x.shape) if dim != but] for x in xs]
    need(all(shape == shapes[0] for shape in shapes))


def _joined(xs: list[Tensor], dim: int, p: Params) -> Tensor:
    _same_shapes(xs, dim)
    sizes = [x.shape[dim] for x in xs]
    explicit = p.get("sizes")
    need(explicit == "auto" or list(explicit or [sizes[0]] * len(xs)) == sizes)
    return torch.cat(xs, dim)


def _all_gather(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    return [_joined(xs, ps[0]["dim"], ps[0])] * len(xs)


def _gather(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    dim, whole = ps[0]["dim"], _joined(xs, ps[0]["dim"], ps[0])
    return [whole if rank == ps[0]["root"] else whole.narrow(dim, 0, 0) for rank in range(len(xs))]


def _cut(x: Tensor, dim: int, sizes: Sequence[int] | str | None, ranks: int, balanced: bool) -> list[Tensor]:
    n = x.shape[dim]
    if sizes is None or sizes == "auto":
        need(balanced or n % ranks == 0)
        sizes = [n // ranks + (rank < n % ranks) for rank in range(ranks)]
    need(sum(int(size) for size in sizes) == n)
    return list(x.split([int(size) for size in sizes], dim))


def _scatter(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    dim, root = ps[0]["dim"], ps[0]["root"]
    _same_shapes(xs, dim)
    need(all(x.shape[dim] in (0, xs[root].shape[dim]) for x in xs))
    return _cut(xs[root], dim, ps[0].get("sizes"), len(xs), balanced=True)


def _shard(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    _same_shapes(xs)
    return [
        _cut(x, p["dim"], p.get("sizes"), len(xs), balanced=True)[rank]
        for rank, (x, p) in enumerate(zip(xs, ps, strict=True))
    ]


def _sum(xs: list[Tensor]) -> Tensor:
    _same_shapes(xs)
    return torch.stack(xs).sum(0)


def _reduced(xs: list[Tensor], op: str) -> Tensor:
    if op in ("sum", "mean"):
        return _sum(xs) / (len(xs) if op == "mean" else 1)
    _same_shapes(xs)
    stacked = torch.stack(xs)
    if op == "prod":
        return stacked.prod(0)
    need(not stacked.is_complex())
    if op == "logsumexp":
        largest = stacked.detach().amax(0)
        return (stacked - largest).exp().sum(0).log() + largest
    if all(x is xs[0] for x in xs):
        return xs[0]
    ordered = stacked.detach().sort(0).values
    need(((ordered[1:] - ordered[:-1]) > NEAR).all())
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _all_reduce(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    return [_reduced(xs, ps[0].get("op", "sum"))] * len(xs)


def _reduce(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    total = _sum(xs)
    return [total if rank == ps[0]["root"] else torch.zeros_like(total) for rank in range(len(xs))]


def _reduce_scatter(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    whole = _reduced(xs, ps[0].get("op", "sum"))
    return _cut(whole, ps[0]["dim"], ps[0].get("sizes"), len(xs), balanced=False)


def _all_to_all(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    ranks, cut, join = len(xs), ps[0]["split_dim"], ps[0]["concat_dim"]
    parts = [_cut(x, cut, p.get("split_sizes"), ranks, balanced=False) for x, p in zip(xs, ps, strict=True)]
    out = []
    for rank in range(ranks):
        taken = [parts[other][rank] for other in range(ranks)]
        _same_shapes(taken, join)
        sizes, explicit = [part.shape[join] for part in taken], ps[rank].get("concat_sizes")
        need(sizes == (list(explicit) if explicit is not None else [sizes[0]] * ranks))
        out.append(torch.cat(taken, join))
    return out


def _broadcast(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    _same_shapes(xs)
    return [xs[ps[0]["root"]]] * len(xs)


def _along(xs: list[Tensor], sources: list[int | None], p: Params) -> list[Tensor]:
    if "sizes" not in p:
        _same_shapes(xs)
        return [torch.zeros_like(xs[0]) if source is None else xs[source] for source in sources]
    _joined(xs, p["dim"], p)
    return [x.narrow(p["dim"], 0, 0) if s is None else xs[s] for x, s in zip(xs, sources, strict=True)]


def _shift(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    ranks, offset, wrap = len(xs), ps[0]["offset"], ps[0]["wrap"]
    from_ = [rank - offset for rank in range(ranks)]
    return _along(xs, [s % ranks if wrap else s if 0 <= s < ranks else None for s in from_], ps[0])


def _permute(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    sources = {target: source for source, target in ps[0]["pairs"]}
    return _along(xs, [sources.get(rank) for rank in range(len(xs))], ps[0])


def _halo(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    dim, (left, right), wrap = ps[0]["dim"], ps[0]["halo"], ps[0]["wrap"]
    whole = _joined(xs, dim, ps[0])
    total, ends = whole.shape[dim], list(accumulate((x.shape[dim] for x in xs), initial=0))
    need(total > 0)
    out = []
    for begin, end in pairwise(ends):
        rows = range(begin - left, end + right)
        kept = [row % total for row in rows] if wrap else [row for row in rows if 0 <= row < total]
        out.append(whole.index_select(dim, torch.tensor(kept, dtype=torch.int64)))
    return out


def _neighbor(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    _same_shapes(xs, 0)
    out = []
    for rank in range(len(xs)):
        parts = [xs[rank][:0]]
        for other, x in enumerate(xs):
            rows = dict(ps[other]["send_rows"]).get(rank, ())
            need(len(rows) == dict(ps[rank]["receive_counts"]).get(other, 0))
            need(all(row < x.shape[0] for row in rows))
            parts.append(x[torch.tensor(rows, dtype=torch.int64)])
        out.append(torch.cat(parts))
    return out


def _exchange(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    ranks = len(xs)
    cut = [_cut(x, p["dim"], p["parts"], ranks, balanced=False) for x, p in zip(xs, ps, strict=True)]
    return [torch.cat([cut[other][rank].reshape(-1, 1) for other in range(ranks)]) for rank in range(ranks)]


def _messages(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    sent = [(source, to) for source, p in enumerate(ps) for to in p["sends"]]
    taken = [(source, to) for to, p in enumerate(ps) for source, _ in p["receives"]]
    need(sorted(sent) == sorted(taken))
    out = []
    for x, p in zip(xs, ps, strict=True):
        need(all(xs[source].shape == tuple(shape) for source, shape in p["receives"]))
        out.append(torch.cat([x.new_zeros(0, 1), *(xs[s].reshape(-1, 1) for s, _ in p["receives"])]))
    return out


def _running(xs: list[Tensor], reverse: bool, own: bool) -> list[Tensor]:
    _same_shapes(xs)
    out = []
    for rank in range(len(xs)):
        ranks = range(rank + (not own), len(xs)) if reverse else range(rank + own)
        out.append(_sum([xs[r] for r in ranks]) if ranks else torch.zeros_like(xs[0]))
    return out


def _convert(xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    _same_shapes(xs)
    kind = ps[0]["src"] + ps[0]["dst"]
    if kind in ("RP", "IP"):
        return [xs[0], *(torch.zeros_like(x) for x in xs[1:])]
    return [xs[0]] * len(xs) if kind == "RI" else list(xs)


MEANINGS: dict[str, Callable[[list[Tensor], list[Params]], list[Tensor]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "convert": _convert,
    "exchange": _exchange,
    "exscan": lambda xs, ps: _running(xs, ps[0]["reverse"], own=False),
    "gather": _gather,
    "halo_exchange": _halo,
    "messages": _messages,
    "neighbor_all_to_all": _neighbor,
    "permute": _permute,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "replicate": lambda xs, ps: xs,  # noqa: ARG005 - one tensor for all ranks sums its gradients by itself
    "scan": lambda xs, ps: _running(xs, ps[0]["reverse"], own=True),
    "scatter": _scatter,
    "shard": _shard,
    "shift": _shift,
}
"""The verbs."""


def _column(tree: Any) -> Tensor:
    if isinstance(tree, Tensor):
        return tree.reshape(-1, 1)
    return torch.cat([_column(one) for one in (tree.values() if isinstance(tree, dict) else tree)])


def _leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for one in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(one)]


Meaning = Callable[[list[Tensor], list[Params]], list[Tensor]]


def _once(made: Callable[[Tensor], Any], xs: Sequence[Tensor]) -> list[Any]:
    """Each rank's, one for all ranks where the tensor is one."""
    found = {id(x): made(x) for x in xs}
    return [found[id(x)] for x in xs]


def _of_structures(inner: Meaning, text: str, xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    trees = _once(lambda x: _leaves(eval(text.format("x"), {"x": x})), xs)
    done = [inner(list(leaves), ps) for leaves in zip(*trees, strict=True)]
    columns: dict[tuple[int, ...], Tensor] = {}
    for own in zip(*done, strict=True):
        columns.setdefault(tuple(map(id, own)), _column(own))
    return [columns[tuple(map(id, own))] for own in zip(*done, strict=True)]


def _of_batches(inner: Meaning, dim: int, xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    batch = xs[0].shape[dim]
    need(batch and all(x.shape[dim] == batch for x in xs))
    rows = _once(lambda x: x.unbind(dim), xs)
    done = [inner([own[i] for own in rows], ps) for i in range(batch)]
    stacked: dict[tuple[int, ...], Tensor] = {}
    for own in zip(*done, strict=True):
        stacked.setdefault(tuple(map(id, own)), torch.stack(own, dim))
    return [stacked[tuple(map(id, own))] for own in zip(*done, strict=True)]


def _energy(y: Tensor) -> Tensor:
    return (y * y.conj()).real.sum() + y.real.sin().sum()


def _own(xs: Sequence[Tensor]) -> list[Tensor]:
    """Each rank's operand as a variable of its own, that has a derivative whether or not its loss is asked for one."""
    return [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in xs]


def _derived(inner: Meaning, way: str, xs: list[Tensor], ps: list[Params]) -> list[Tensor]:
    if way == "jvp":
        return list(
            torch.func.jvp(lambda *own: tuple(inner(list(own), ps)), tuple(xs), tuple(x.cos() for x in xs))[1]
        )
    with torch.enable_grad():
        own = _own(xs)
        ys = list({id(y): y for y in inner(own, ps)}.values()) if ps[0].get("dst") == "I" else inner(own, ps)
        if way == "grad":
            total = sum((_energy(y) for y in ys), torch.zeros(()))
            found = torch.autograd.grad(total, own, create_graph=True, materialize_grads=True)
        else:
            found = torch.autograd.grad(
                ys, own, [y.sin() for y in ys], create_graph=True, materialize_grads=True
            )
    kept = any(x.requires_grad for x in xs) and torch.is_grad_enabled()
    return [g if kept else g.detach() for g in found]


def meaning(verb: str, way: str) -> Meaning:
    """What a verb means that is called in some way."""
    plain = MEANINGS[verb]
    if way in ("", BY_HAND):
        return plain
    if way in DERIVATIVES:
        return partial(_derived, plain, way)
    if way in VMAPS:
        return partial(_of_batches, plain, int(way[-1]))
    return partial(_of_structures, plain, way)
