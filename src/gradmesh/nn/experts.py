"""Expert parallelism: tokens are sent to the ranks of their experts and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from gradmesh.nn.inputs import outside, readable, upcast
from gradmesh.nn.tensor import Parallel
from gradmesh.ops.sizes import balanced, intervals
from gradmesh.runtime.mesh import Axis, AxisLike
from gradmesh.types import I
from gradmesh.verbs.call import Call, integer
from gradmesh.verbs.collectives import all_gather, all_reduce, all_to_all


class ExpertDispatch:
    """Sends tokens to the experts that a router chose, and combines the results. Constructing it is a collective.

    ::

        V -> V    send:     tokens (n, ...) -> one row for each (token, expert) pair of this rank's experts, by expert
        V -> V    combine:  those rows -> tokens (n, ...), each the weighted sum over its experts

    Experts are distributed over the ranks in order. Numbers of tokens may differ between ranks and experts, and may be
    0. An expert's rows are ordered by rank and token, so that results are deterministic.

    Args:
        chosen: the experts of each token, shape (n, k), int64.
        experts: the number of experts of all ranks, or each rank's number, e.g. `experts=(3, 2)`.
        axis: the ranks.
        capacity_factor: limits each expert to `ceil(capacity_factor * choices / experts)` rows, where `choices` counts
            the (token, expert) pairs of all ranks; pairs over the limit are dropped. None drops nothing.

    On a device the host waits for it once, in the constructor, for the numbers of rows.

    Which pairs are dropped does not depend on how the tokens are distributed over the ranks: an expert accepts all
    tokens' first choices before any second choice, and among equal choices the tokens in the order of the ranks and
    of each rank's tokens. A dropped pair sends nothing and adds 0 to its token; the weights of the others stay.

    Attributes:
        axis: the ranks.
        sizes: each rank's number of experts.
        counts: the number of rows that each of this rank's experts gets.
        kept: mask of the pairs that were not dropped, shape (n, k).

    Raises:
        ArgumentError: an expert of `chosen` is out of range, or `capacity_factor` is not a positive number.

    Source: Lepikhin et al., GShard (arXiv:2006.16668), section 2, with its capacity 2 N / E for k = 2 times a factor as
    in Fedus et al., Switch Transformers (arXiv:2101.03961), equation 3; without a capacity: Gale et al., MegaBlocks
    (arXiv:2211.15841), section 3.

    Example:
        >>> def on_each_rank():
        ...     x = torch.tensor([[1.0], [2.0]])
        ...     chosen = torch.tensor([[0], [1]])  # rank 0 has expert 0, rank 1 expert 1
        ...     plan = gm.nn.ExpertDispatch(chosen, 2)
        ...     rows = plan.send(x)
        ...     return rows.flatten().tolist(), plan.combine(10 * rows, torch.ones(2, 1)).flatten().tolist()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [([1.0, 1.0], [10.0, 20.0]), ([2.0, 2.0], [10.0, 20.0])]
    """

    def __init__(
        self,
        chosen: Tensor,
        experts: int | Sequence[int],
        axis: AxisLike = None,
        *,
        capacity_factor: float | None = None,
    ) -> None:
        call = Call("nn.ExpertDispatch", chosen, axis)
        here: Axis = call.axis
        sizes = _distributed(call, experts)
        _check_capacity(call, capacity_factor)
        if chosen.dim() != 2 or chosen.dtype not in (torch.int64, torch.int32):
            call.fail(
                "chosen does not have k experts for each token",
                expected="a tensor of int64 of shape (tokens, k)",
                got=f"{chosen.dtype} of shape {list(chosen.shape)}",
                remedy="pass scores.topk(k).indices",
            )
        _check_chosen(call, chosen, sum(sizes))
        self.axis, self.sizes = here, sizes
        self.tokens, self.chosen = chosen.shape
        total, local = sum(sizes), sizes[here.rank]
        flat = chosen.reshape(-1).long()
        self.kept = torch.ones_like(chosen, dtype=torch.bool)
        if capacity_factor is not None:
            self.kept = _within_capacity(chosen, total, capacity_factor, here)
            flat = torch.where(self.kept.reshape(-1), flat, total)  # dropped pairs come last
        wanted = _counted(flat, total + 1)[:total]
        came = all_to_all(wanted, here, split_sizes=sizes, concat_sizes=(local,) * here.size)
        # The only time that the host waits for a device.
        every: list[int] = torch.cat((wanted, came)).tolist()
        by_rank = [every[start : start + local] for start in range(total, len(every), local or 1)] or [[]]
        self._sent: list[int] = [sum(every[start:end]) for start, end in intervals(sizes)]
        self._received: list[int] = [sum(rows) for rows in by_rank] if local else [0] * here.size
        self.counts: list[int] = [sum(of_expert) for of_expert in zip(*by_rank, strict=True)]
        self._order = flat.argsort(stable=True)[: sum(self._sent)]
        """The (token, expert) pairs that are kept, expert by expert."""
        # Rows arrive ordered by rank and expert; sort them by expert.
        expert = torch.arange(local, device=chosen.device).repeat(here.size)
        rows = expert.repeat_interleave(came, output_size=sum(self._received))
        self._by_expert = rows.argsort(stable=True)

    def send(self, x: Tensor) -> Tensor:
        """Send tokens to their experts; returns this rank's experts' rows, ordered by expert, `counts` of each.

        Args:
            x: this rank's tokens, shape (n, ...).

        Raises:
            ArgumentError: the number of rows is not the number of tokens.
        """
        if x.shape[:1] != (self.tokens,):
            self._refuse("send", x, "the number of rows is not the number of tokens", f"({self.tokens}, ...)")
        rows = x.index_select(0, self._order // self.chosen if self.chosen else self._order)
        return self._exchange(rows, self._sent, self._received).index_select(0, self._by_expert)

    def combine(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Send the experts' results back; returns for each token the weighted sum, added in the order of choice.

        Args:
            rows: the result for each row that `send` returned, in its order.
            weights: of each token's experts, shape (n, k).

        Raises:
            ArgumentError: wrong number of rows, or wrong shape of `weights`.
        """
        received = sum(self._received)
        if rows.shape[:1] != (received,):
            problem = "the number of rows is not the number of rows that send() returned"
            self._refuse("combine", rows, problem, f"({received}, ...)")
        if tuple(weights.shape) != (self.tokens, self.chosen):
            expected = f"({self.tokens}, {self.chosen})"
            self._refuse("combine", weights, "weights does not have one weight for each choice", expected)
        rows = _placed(rows, self._by_expert, len(rows))
        back = _placed(self._exchange(rows, self._received, self._sent), self._order, self.kept.numel())
        back = back.view(self.tokens, self.chosen, *rows.shape[1:])
        return (back * weights.view(*weights.shape, *[1] * (rows.dim() - 1))).sum(1)

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return all_to_all(rows, self.axis, split_sizes=sent, concat_sizes=received)

    def _refuse(self, method: str, x: Tensor, problem: str, expected: str) -> NoReturn:
        call = Call(f"nn.ExpertDispatch.{method}", x, self.axis)
        call.fail(
            problem,
            expected=f"shape {expected}",
            got=f"shape {list(x.shape)}",
            remedy="construct a new ExpertDispatch for each batch of tokens",
        )


def _distributed(call: Call, experts: int | Sequence[int]) -> tuple[int, ...]:
    """Each rank's number of experts."""
    total, ranks = integer(experts), call.axis.size
    given = [integer(n) for n in experts] if isinstance(experts, Sequence) else []
    sizes = balanced(total, ranks) if total is not None else tuple(-1 if n is None else n for n in given)
    if len(sizes) != ranks or min(sizes) < 0 or not sum(sizes):
        call.fail(
            "experts cannot be distributed over the ranks",
            expected=f"an int >= 1, or {ranks} ints >= 0 with a sum >= 1",
            got=f"experts={experts!r}",
            remedy=f"pass the number of experts of all ranks, e.g. experts={2 * ranks}, or of each rank, e.g. "
            f"experts={(2,) * ranks}",
        )
    return sizes


def _counted(numbers: Tensor, length: int) -> Tensor:
    """`torch.bincount`, for which the host does not wait for the device."""
    return torch.zeros(length, dtype=torch.int64, device=numbers.device).index_add_(
        0, numbers, torch.ones_like(numbers)
    )


def _placed(rows: Tensor, at: Tensor, length: int) -> Tensor:
    """A tensor of `length` rows with each row at its index, and zeros elsewhere."""
    return rows.new_zeros(length, *rows.shape[1:]).index_copy(0, at, rows)


def _check_capacity(call: Call, factor: object) -> None:
    if factor is not None and not (isinstance(factor, (int, float)) and 0 < factor < math.inf):
        call.fail(
            "capacity_factor is not a positive number",
            expected="a number above 0, or None",
            got=f"capacity_factor={factor!r}",
            remedy="pass e.g. 1.25 for 25 % more rows than if all experts were chosen equally often, or None to drop "
            "nothing",
        )


def _within_capacity(chosen: Tensor, experts: int, factor: float, axis: Axis) -> Tensor:
    """Mask of this rank's (token, expert) pairs that are within their expert's capacity."""
    k = chosen.shape[1]
    # Groups of pairs of the same choice and expert, in order of choice: a pair's position at its expert is the number
    # of that expert's pairs in earlier groups, on earlier ranks and at earlier tokens.
    group = (chosen.long() + experts * torch.arange(k, device=chosen.device)).reshape(-1)
    count = _counted(group, k * experts)
    every = all_gather(count.unsqueeze(0), axis)
    total = every.sum(0).view(k, experts)
    before = (total.cumsum(0) - total).view(-1) + every[: axis.rank].sum(0)
    order = group.argsort(stable=True)
    here = torch.arange(len(group), device=chosen.device) - (count.cumsum(0) - count)[group[order]]
    position = torch.empty_like(order)
    position[order] = before[group[order]] + here
    most = (total.sum().to(torch.float64) * factor / experts).ceil()  # as `math.ceil`, on the device
    return (position < most).view_as(chosen)


class ExpertParallel(Parallel):
    """A mixture-of-experts layer with experts distributed over the ranks; each token is sent to its top-k experts.

    ::

        V -> V    tokens (n, d) -> (n, d), or (B, S, d) -> (B, S, d)
                  backward: gradients travel the same way back; an expert exists on one rank only, and its gradients
                  are the sum over all ranks' tokens

    The leading dims of the scores are token dims: a router that maps x (B, S, d) to (B, S, experts) routes B * S
    tokens. Experts get and return rows (m, d), m >= 0, of the same shape. Ranks without tokens or without experts take
    part in both exchanges, forward and backward.

    On a device the host waits for it once in each forward, as in `ExpertDispatch`, and never in backward.

    The router is replicated, and each rank routes its own tokens: sum its gradients over the axis
    (`gm.nn.Replicated(router)`). A data parallel wrapper over this axis must exclude the experts' parameters.

    Args:
        router: maps tokens to a score for each expert, shape (n, experts) or (B, S, experts).
        expert: maps an expert's global index to its module; called for this rank's experts only.
        experts: the number of experts of all ranks, or each rank's number, e.g. `experts=(3, 2)`.
        k: number of experts for each token.
        axis: the ranks.
        normalize: True to scale the softmax weights of a token's k experts to a sum of 1, before any is dropped.
        capacity_factor: limits the rows of each expert as in `ExpertDispatch`; None drops nothing. Dropped choices add
            0 to their token, so that a residual connection around the layer passes the token through.

    Attributes:
        experts: this rank's experts, by global index.

    Raises:
        ArgumentError: the experts cannot be distributed over the ranks, or `k` or `capacity_factor` is out of range;
            when called, the scores do not match the tokens or the number of experts.

    Example:
        >>> def on_each_rank():
        ...     torch.manual_seed(0)
        ...     router = gm.nn.Replicated(torch.nn.Linear(3, 4))
        ...     layer = gm.nn.ExpertParallel(router, lambda number: torch.nn.Linear(3, 3), 4, k=2)
        ...     y = layer(torch.ones(2 + gm.rank(), 3))
        ...     return tuple(y.shape), sorted(layer.experts)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [((2, 3), ['0', '1']), ((3, 3), ['2', '3'])]
    """

    holds_parts = False

    def __init__(
        self,
        router: nn.Module,
        expert: Callable[[int], nn.Module],
        experts: int | Sequence[int],
        k: int,
        axis: AxisLike = None,
        *,
        normalize: bool = True,
        capacity_factor: float | None = None,
    ) -> None:
        super().__init__(axis)
        call = Call("nn.ExpertParallel", torch.empty(0, 1, dtype=torch.int64), axis)
        sizes = _distributed(call, experts)
        if integer(k) is None or not 1 <= k <= sum(sizes):
            call.fail(
                "k is out of range",
                expected=f"an int with 1 <= k <= {sum(sizes)}, the number of experts",
                got=f"k={k!r}",
                remedy="pass e.g. k=1",
            )
        _check_capacity(call, capacity_factor)
        first = sum(sizes[: call.axis.rank])
        self.router, self.sizes, self.k, self.normalize = router, sizes, k, normalize
        self.capacity_factor = capacity_factor
        numbers = range(first, first + sizes[call.axis.rank])
        self.experts = nn.ModuleDict({str(number): expert(number) for number in numbers})

    def _sharded(self) -> Iterator[tuple[nn.Module, str]]:
        """The parameters of this rank's experts."""
        experts = getattr(self, "experts", None)
        for module in () if experts is None else experts.modules():
            own = module.named_parameters(recurse=False, remove_duplicate=False)
            yield from ((module, name) for name, _ in own)

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of the experts' results for each token."""
        return self.routed(x, self.router(x))

    def routed(self, x: Tensor, scores: Tensor) -> Tensor:
        """`forward` with given scores, for callers that need them for `balance_loss` too."""
        total = sum(self.sizes)
        tokens = scores.shape[:-1]
        if scores.dim() < 2 or scores.shape[-1] != total or x.shape[: len(tokens)] != tokens:
            self.refuse(
                scores,
                f"one score for each of {total} experts and each token of x {list(x.shape)}",
                f"use a router with {total} outputs, e.g. torch.nn.Linear(d, {total})",
                f"scores of shape {list(scores.shape)}",
            )
        weights, chosen = scores.reshape(tokens.numel(), total).softmax(-1).topk(self.k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        plan = ExpertDispatch(chosen, self.sizes, self.over, capacity_factor=self.capacity_factor)
        sent = plan.send(x.reshape(tokens.numel(), *x.shape[len(tokens) :]))
        # The empty last part keeps the exchange in the graph of a rank whose results do not depend on its rows.
        *parts, empty = sent.split([*plan.counts, 0])
        done = [each(part) for each, part in zip(self.experts.values(), parts, strict=True)]
        if done:
            empty = empty.to(done[0].dtype).reshape(0, *done[0].shape[1:])
        rows = torch.cat((*done, empty))
        # Under autocast results are narrower than x, but a rank without experts has no result to take the dtype from.
        rows = rows if all(self.sizes) else rows.to(x.dtype)
        y = plan.combine(rows, weights.to(x.dtype))
        return y.reshape(*tokens, *y.shape[1:])


def balance_loss(scores: Tensor, chosen: Tensor, axis: AxisLike = None) -> Tensor:
    r"""Load balancing loss over the tokens of all ranks; 1 if all experts get equally many tokens.

    ::

        V -> I    scores (n, E), chosen (n, k) -> ()     E sum_e f_e p_e; or (B, S, E) and (B, S, k)
                  f_e: the fraction of all ranks' choices that are e, a constant
                  p_e: the mean over all ranks' tokens of the softmax of the scores

    It differs from the mean of per-rank losses, because f and p are averaged before they are multiplied. Every rank
    gets the same value, which counts once, and the gradient with respect to its own scores. If no rank has tokens, the
    loss and its gradient are 0.

    Args:
        scores: the router's scores of this rank's tokens, before the softmax (computed in float32 at least).
        chosen: the experts of each token.
        axis: the ranks over whose tokens the load is balanced.

    Raises:
        ArgumentError: the shapes do not match, or an expert of `chosen` is out of range (detected on a CPU).

    Source: Fedus et al., Switch Transformers (arXiv:2101.03961), equation 4, without its weight; for k > 1, f counts
    all choices.

    Example:
        >>> def on_each_rank():
        ...     scores = torch.zeros(2, 2)
        ...     return gm.nn.balance_loss(scores, torch.tensor([[0], [1]])).item()
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [1.0, 1.0]
    """
    call = Call("nn.balance_loss", scores, axis)
    fits = scores.dim() == chosen.dim() >= 2 and chosen.shape[:-1] == scores.shape[:-1]
    if not fits or chosen.dtype not in (torch.int64, torch.int32):
        call.fail(
            "the shapes of scores and chosen do not match",
            expected="scores (tokens, experts) and chosen (tokens, k) as int64, of the same tokens; or (B, S, experts) "
            "and (B, S, k)",
            got=f"scores {list(scores.shape)}, chosen {chosen.dtype} {list(chosen.shape)}",
            remedy="pass e.g. chosen=scores.topk(2).indices",
        )
    experts = scores.shape[-1]
    _check_chosen(call, chosen, experts)
    scores = upcast(scores).flatten(0, -2)
    fallen = _counted(chosen.reshape(-1).long(), experts).to(scores.dtype)
    counts = torch.cat((fallen, scores.new_full((1,), len(scores))))
    counts = all_reduce(counts, call.axis, dst=I)
    # clamp: there may be no tokens on any rank.
    means = all_reduce(scores.softmax(-1).sum(0), call.axis, dst=I) / counts[-1].clamp(min=1)
    # Count all choices instead of multiplying by k, which may differ between ranks.
    return experts * (counts[:-1] / counts[:-1].sum().clamp(min=1) * means).sum()


def _check_chosen(call: Call, chosen: Tensor, experts: int) -> None:
    if readable(chosen) and (wrong := outside(chosen, experts)):
        call.fail(
            "an expert index in chosen is out of range",
            expected=f"0 <= expert < {experts}",
            got=f"experts {wrong}",
            remedy=f"use global expert indices, e.g. scores.topk(k).indices of scores of shape (tokens, {experts})",
        )
