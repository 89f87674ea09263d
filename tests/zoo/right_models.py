"""Programs with a loss whose gradients are right: attention, contrastive losses, graphs, experts, parallel layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gradmesh as gm
from gradmesh.verify import Input
from tests.zoo.data import common, complex_normal, invariant, normal, weighted
from tests.zoo.program import right
from tests.zoo.raw import rank, world
from tests.zoo.wrong_contrastive import features, scores, whole
from tests.zoo.wrong_sequence import attention, parts

REPLICATED = "replicated"


def net() -> nn.Module:
    """The same on every rank; the default generator is one for all ranks that are threads."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(common(*parameter.shape, seed=seed))
    return model


# ---- data parallelism


@right("gradcheck", "DistributedDataParallel, a loss of each rank's own", objective="mean")
def ddp() -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return weighted(model(x), rank())

    return loss, lambda r: (Input(DistributedDataParallel(net()), gm.I), Input(normal(r, 3, 4), None))


@right("gradcheck", "FSDP2's fully_shard, a loss of each rank's own", objective="mean")
def fsdp2() -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return weighted(model(x), rank())

    def inputs(r: int) -> Any:
        model = net()
        mesh = init_device_mesh("cpu", (world(),))
        for layer in (model[0], model[2], model):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        return model, Input(normal(r, 3, 4), None)

    return loss, inputs


@right("gradcheck", "a replicated module whose gradients are summed after backward: nothing in the graph")
def replicated_module() -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return weighted(model(x), rank())

    return loss, lambda r: (net(), normal(r, 3, 4))


@right("gradcheck", "batch statistics of all ranks", order=2)
def batch_norm_over_all_ranks() -> Any:
    def loss(x: Tensor) -> Tensor:
        moments = gm.all_reduce(torch.stack([x.sum(0), x.square().sum(0)]), dst=gm.R)
        mean, square = moments / (world() * len(x))
        y = (x - mean) * torch.rsqrt(square - mean.square() + 1e-3)
        return weighted(y, rank())

    return loss, lambda r: (normal(r, 4, 2),)


# ---- contrastive


@right("gradcheck", "CLIP with local losses")
def clip_with_local_losses() -> Any:
    def loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
        scale = gm.replicate(scale).exp()
        return scores(scale * images, gm.all_gather(texts)) + scores(scale * texts, gm.all_gather(images))

    return loss, lambda r: (*features(r), invariant(common(1)))


@right("gradcheck", "CLIP with the whole loss on every rank", objective=REPLICATED)
def clip_with_one_loss() -> Any:
    def loss(images: Tensor, texts: Tensor) -> Tensor:
        return whole(gm.all_gather(images, dst=gm.I), gm.all_gather(texts, dst=gm.I))

    return loss, features


@right("gradcheck", "the sigmoid loss with texts going around a ring", world_size=3)
def siglip_ring() -> Any:
    def loss(images: Tensor, texts: Tensor) -> Tensor:
        total = -F.logsigmoid((images * texts).sum(1)).sum()
        theirs = texts
        for _ in range(world() - 1):
            theirs = gm.shift(theirs)
            total = total - F.logsigmoid(-(images @ theirs.T)).mean()
        return total

    return loss, features


# ---- tensor parallelism


@right("gradcheck", "Megatron's MLP with a residual", objective=REPLICATED)
def tensor_parallel_mlp() -> Any:
    def loss(x: Tensor, columns: Tensor, rows: Tensor, bias: Tensor) -> Tensor:
        y = torch.tanh(gm.replicate(x) @ columns) @ rows
        return weighted(x + gm.all_reduce(y, dst=gm.I) + bias)

    def inputs(r: int) -> Any:
        return (
            invariant(common(3, 4)),
            normal(r, 4, 2, seed=1),
            normal(r, 2, 4, seed=2),
            invariant(common(4, seed=1)),
        )

    return loss, inputs


@right("gradcheck", "the same with the sequence cut between the layers", objective=REPLICATED)
def sequence_parallel_mlp() -> Any:
    def loss(x: Tensor, gain: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        normed = gm.replicate(gain) * x / (1e-3 + x.square().mean(1, keepdim=True)).sqrt()
        y = gm.reduce_scatter(torch.tanh(gm.all_gather(normed) @ columns) @ rows)
        return gm.all_reduce(weighted(x + y, rank()), dst=gm.I)

    def inputs(r: int) -> Any:
        return normal(r, 2, 4), invariant(common(4)), normal(r, 4, 2, seed=1), normal(r, 2, 4, seed=2)

    return loss, inputs


@right("gradcheck", "DTensor's ColwiseParallel and RowwiseParallel", objective=REPLICATED)
def tensor_parallel_by_dtensor() -> Any:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return weighted(model(x))

    def inputs(r: int) -> Any:
        mesh = init_device_mesh("cpu", (world(),))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(net(), mesh, plan), Input(common(3, 4), None)

    return loss, inputs


@right("gradcheck", "the cross-entropy over a cut vocabulary", objective=REPLICATED)
def vocabulary_parallel_loss() -> Any:
    def loss(logits: Tensor) -> Tensor:
        target = gm.all_reduce(logits[:, 0] * (rank() == 0), dst=gm.I)
        return (gm.all_reduce(logits.exp().sum(1), dst=gm.I).log() - target).mean()

    return loss, lambda r: (normal(r, 3, 4),)


@right("gradcheck", "the same by the log-sum over ranks, which does not overflow", objective=REPLICATED)
def vocabulary_parallel_loss_by_logsumexp() -> Any:
    def loss(logits: Tensor) -> Tensor:
        target = gm.all_reduce(logits[:, 0] * (rank() == 0), dst=gm.I)
        return (gm.all_reduce(300 + logits.logsumexp(1), op="logsumexp", dst=gm.I) - target).mean()

    return loss, lambda r: (normal(r, 3, 4),)


@right("gradcheck", "a weight cut by hand, gathered before use")
def sharded_weight() -> Any:
    def loss(x: Tensor, shard: Tensor) -> Tensor:
        return weighted(x @ gm.all_gather(shard), rank())

    return loss, lambda r: (normal(r, 3, 4), normal(r, 2, 5, seed=1))


# ---- sequences


@right("gradcheck", "ring attention with an online softmax", world_size=3)
def ring_attention() -> Any:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = q.new_zeros(len(q), v.shape[1]), q.new_full((len(q), 1), -torch.inf)
        for step in range(world()):
            scores = q @ k.T / q.shape[1] ** 0.5
            block = scores.logsumexp(1, keepdim=True)
            total = torch.logaddexp(lse, block)
            out = out * torch.exp(lse - total) + torch.exp(scores - total) @ v
            lse = total
            if step + 1 < world():
                k, v = gm.shift(k), gm.shift(v)
        return weighted(out, rank())

    return loss, parts


@right("gradcheck", "keys and values gathered")
def gathered_attention() -> Any:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return weighted(attention(q, gm.all_gather(k), gm.all_gather(v)), rank())

    return loss, parts


@right("gradcheck", "Ulysses: from rows to heads and back")
def ulysses_attention() -> Any:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [gm.all_to_all(x, split_dim=1, concat_dim=0) for x in (q, k, v)]
        return weighted(gm.all_to_all(attention(*heads), split_dim=0, concat_dim=1), rank())

    return loss, parts


@right("gradcheck", "a linear recurrence over ranks by a prefix sum", order=2)
def prefix_states() -> Any:
    def loss(x: Tensor) -> Tensor:
        return weighted(torch.tanh(x) * gm.exscan(x.square()), rank())

    return loss, lambda r: (normal(r, 3, 2),)


@right("gradcheck", "a spectral layer with complex weights, cut over the modes", objective=REPLICATED)
def spectral_layer() -> Any:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = gm.all_reduce(x * w, dst=gm.I)
        return y.real.sin().sum() + y.imag.square().sum()

    return loss, lambda r: (complex_normal(r, 3, 2), complex_normal(r, 3, 2, seed=1))


@right("gradcheck", "a convolution over rows that the ranks share", world_size=3)
def halo_convolution() -> Any:
    def loss(x: Tensor, w: Tensor) -> Tensor:
        y = gm.halo_exchange(x, halo=1, wrap=True, sizes="auto")
        return weighted(F.conv1d(y.T[None], gm.replicate(w)), rank())

    return loss, lambda r: (normal(r, 3 + r, 2), invariant(common(2, 2, 3)))


# ---- graphs and experts


@right("gradcheck", "atoms of all ranks, energies and forces", objective=REPLICATED, order=2)
def graph_energy() -> Any:
    def energy(positions: Tensor) -> Tensor:
        distance = (positions[:, None] - gm.all_gather(positions)[None]).square().sum(-1)
        return gm.all_reduce(torch.exp(-distance).sum(), dst=gm.I)

    return energy, lambda r: (normal(r, 2, 3),)


@right("gradcheck", "the exchange of just those nodes that a rank's edges need", world_size=3)
def graph_exchange() -> Any:
    def loss(nodes: Tensor) -> Tensor:
        others = [r for r in range(world()) if r != rank()]
        rows = {r: torch.tensor([1, 0]) for r in others}
        ghosts = gm.neighbor_all_to_all(nodes, send_rows=rows, receive_counts=dict.fromkeys(others, 2))
        return weighted(torch.tanh(torch.cat([nodes, ghosts])), rank())

    return loss, lambda r: (normal(r, 2 + r, 3),)


@right("gradcheck", "nodes in parts of any size, gathered")
def gather_of_uneven_parts() -> Any:
    def loss(nodes: Tensor) -> Tensor:
        return weighted(gm.all_gather(nodes, sizes="auto"), rank())

    return loss, lambda r: (normal(r, 3 * r, 2),)


@right("gradcheck", "tokens to experts and back, a router that all share")
def expert_parallel_layer() -> Any:
    def loss(tokens: Tensor, router: Tensor, expert: Tensor) -> Tensor:
        gate = torch.softmax(tokens @ gm.replicate(router), 1)
        served = gm.all_to_all(torch.tanh(gm.all_to_all(tokens) @ expert))
        balance = gm.all_reduce(gate.mean(0), op="mean", dst=gm.R).square().sum()
        return weighted(gate[:, :1] * served, rank()) + balance

    return loss, lambda r: (normal(r, 4, 3), invariant(common(3, 2)), normal(r, 3, 3, seed=1))


@right("gradcheck", "the largest value over all ranks")
def largest_value() -> Any:
    def loss(x: Tensor) -> Tensor:
        return weighted(gm.all_reduce(x, op="max", dst=gm.R), rank())

    return loss, lambda r: (normal(r, 3, 2),)


@right("gradcheck", "a rank whose loss does not use the result, in ordered()", ordered=True)
def unused_result_in_order() -> Any:
    def loss(x: Tensor, y: Tensor) -> Tensor:
        both = gm.all_gather(x), gm.all_gather(y)
        return weighted(both[dist.get_rank()], rank())

    return loss, lambda r: (normal(r, 3, 2), normal(r, 3, 2, seed=1))
