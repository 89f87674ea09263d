"""Sharded training of models that hold collectives: torch's wrappers and the verbs are one dense process."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import checkpoint

import gradmesh as gm
from tests.fsdp_programs import (
    ADAM,
    ROWS,
    SGD,
    WHOLE,
    State,
    apart,
    from_full,
    left,
    passing,
    state_of,
    stepped,
    to_full,
    towers,
    wrapped,
)

pytestmark = pytest.mark.processes
Processes = Callable[[int], Callable[..., list[Any]]]
Trained = tuple[list[float], dict[str, Tensor]]
KINDS = ("FullyShardedDataParallel", "FullyShardedDataParallel, original", "fully_shard")


def trained(kind: str, synced: bool, dtype: torch.dtype, options: dict[str, Any]) -> Trained:
    net = wrapped(kind, towers(synced, dtype))
    optimizer = (SGD if synced else ADAM)(net.parameters())
    figures = stepped(net, optimizer, range(3), **options)
    return figures, left(net, optimizer)


def alone(*args: Any) -> Any:
    """The same on one process, dense."""
    return gm.launch(trained, 1, backend="threads", args=("dense", *args))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_model_with_collectives_in_it_is_the_dense_one(kind: str, processes: Processes) -> None:
    """A norm over all ranks, a gather in the middle, a contrastive loss, two micro-batches without a sum."""
    how: tuple[Any, ...] = (True, torch.float64, {"micro": 2})
    losses, kept = alone(*how)
    assert {"image.1.running_mean", "loss.log_scale", "image.0.weight momentum_buffer"} <= kept.keys()
    for figures, found in processes(2)(trained, kind, *how):
        assert figures == pytest.approx(losses, abs=1e-12)
        assert apart(found, kept) < 1e-12


@pytest.mark.parametrize("kind", ["verbs", *KINDS])
def test_clipped_to_a_norm_of_all_parts(kind: str, worlds: Any) -> None:
    """In float32, as FullyShardedDataParallel takes norms in it."""
    how: tuple[Any, ...] = (False, torch.float32, {"limit": 0.1})
    figures, kept = alone(*how)
    assert min(figures[1::2]) > 0.2  # so that something is clipped
    for got, found in worlds(2, "gloo", 240).run(trained, kind, *how):
        assert got == pytest.approx(figures, rel=2e-5)
        assert apart(found, kept) < 2e-5


def test_the_verbs_alone_are_as_both_wrappers_and_the_dense_model(processes: Processes) -> None:
    """Parameters and the whole of the optimizer's state."""
    how: tuple[Any, ...] = (False, torch.float64, {})
    _, kept = alone(*how)
    assert "image.0.weight exp_avg" in kept
    for kind in ("verbs", *KINDS):
        for _, found in processes(2)(trained, kind, *how):
            assert apart(found, kept) < 1e-12, kind


def without_a_factor() -> dict[str, Tensor]:
    net = wrapped("FullyShardedDataParallel", towers())
    optimizer = SGD(net.parameters())
    stepped(net, optimizer, range(3), averaged=2)  # as if gradients were divided once more
    return left(net, optimizer)


def test_a_factor_of_the_number_of_ranks_is_seen(worlds: Any) -> None:
    """The comparison can fail."""
    _, kept = alone(True, torch.float64, {"averaged": 2.0})
    _, right = alone(True, torch.float64, {})
    found = worlds(2, "gloo", 240).run(without_a_factor)[0]
    assert apart(found, right) < 1e-12
    assert apart(kept, right) > 1e-3


# ---- Mixed precision, and a hook -------------------------------------------------------------------------------------


def in_lower_precision() -> tuple[torch.dtype, list[float]]:
    net = wrapped("FullyShardedDataParallel, mixed", towers(False))
    seen: list[torch.dtype] = []
    net.get_submodule("image").register_forward_hook(lambda _, __, y: seen.append(y.dtype))
    figures = stepped(net, SGD(net.parameters()), range(3))
    assert next(net.parameters()).dtype is torch.float64
    return seen[0], figures


def test_mixed_precision_reaches_the_verbs(worlds: Any) -> None:
    """Parameters of double precision are used in single: the rounding of single, and no more."""
    figures = gm.launch(dense_losses, 1, backend="threads")[0]
    for dtype, found in worlds(2, "gloo", 240).run(in_lower_precision):
        assert dtype is torch.float32
        far = max(abs(a - b) for a, b in zip(found, figures, strict=True))
        assert 1e-10 < far < 1e-5


def dense_losses() -> list[float]:
    net = towers(False)
    return stepped(net, SGD(net.parameters()), range(3))


def summed_by_a_verb(sent: list[int], grad: Tensor, own: Tensor) -> None:
    """A communication hook: the sum of all ranks' gradients, and no mean."""
    sent.append(grad.numel())
    own.copy_(gm.reduce_scatter(grad))


def hooked() -> tuple[int, dict[str, Tensor]]:
    net = wrapped("FullyShardedDataParallel", towers())
    assert isinstance(net, FullyShardedDataParallel)
    sent: list[int] = []
    net.register_comm_hook(sent, summed_by_a_verb)
    optimizer = SGD(net.parameters())
    stepped(net, optimizer, range(3), averaged=False)  # a sum: nothing is divided
    return len(sent), left(net, optimizer)


def test_a_verb_is_the_communication_hook(processes: Processes) -> None:
    _, kept = alone(True, torch.float64, {})
    for calls, found in processes(2)(hooked):
        assert calls == 3 * 3  # two towers and what is left, in three steps
        assert apart(found, kept) < 1e-12


# ---- Optimizer state -------------------------------------------------------------------------------------------------


def halfway(kind: str) -> State:
    """Two steps, and the optimizer's state whole, with the parameters beside it."""
    net = wrapped(kind, towers(False))
    optimizer = ADAM(net.parameters())
    stepped(net, optimizer, range(2))
    if kind == "verbs":
        return to_full(net, optimizer)
    return state_of(net, optimizer)


def loaded(kind: str, state: State) -> State:
    """A training that begins with a state that was made elsewhere, and its state after a step."""
    net = wrapped(kind, towers(False))
    optimizer = ADAM(net.parameters())
    if kind == "verbs":
        stepped(net, optimizer, range(2, 3))
        from_full(net, optimizer, state)
        return to_full(net, optimizer)
    names = [name for name, _ in towers(False).named_parameters()]
    groups = [{**torch.optim.Adam([torch.ones(1)], lr=1e-2, eps=1e-3).param_groups[0], "params": names}]
    whole: Any = {"state": state, "param_groups": groups}
    set_optimizer_state_dict(net, optimizer, whole, options=WHOLE)
    return state_of(net, optimizer)


def flat(state: State) -> dict[str, Tensor]:
    return {f"{name} {key}": torch.as_tensor(v) for name, kept in state.items() for key, v in kept.items()}


@pytest.mark.parametrize("kind", ["FullyShardedDataParallel", "fully_shard"])
def test_optimizer_state_goes_from_the_verbs_to_a_wrapper_and_back(kind: str, worlds: Any) -> None:
    run = worlds(2, "gloo", 240).run
    of_verbs, of_wrapper = run(halfway, "verbs")[0], run(halfway, kind)[0]
    assert apart(flat(of_verbs), flat(of_wrapper)) < 1e-13
    for there, back in ((kind, of_verbs), ("verbs", of_wrapper)):
        for found in run(loaded, there, back):
            assert apart(flat(found), flat(back)) == 0


def legacy() -> tuple[float, float, int]:
    """Full, rekeyed and sharded state, by the names that FullyShardedDataParallel itself has for it."""
    net, dense = wrapped("FullyShardedDataParallel", towers()), towers()
    optimizer, other = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (net, dense))
    stepped(net, optimizer, range(2))
    fsdp = FullyShardedDataParallel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of these names themselves, and of what torch uses below them
        full = fsdp.full_optim_state_dict(net, optimizer, rank0_only=False)
        numbered = fsdp.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, dense, optim=other)
        other.load_state_dict(numbered)
        named = fsdp.rekey_optim_state_dict(
            other.state_dict(), OptimStateKeyType.PARAM_NAME, dense, optim=other
        )
        fsdp.set_state_dict_type(net, StateDictType.SHARDED_STATE_DICT)
        parts = fsdp.optim_state_dict(net, optimizer)
        own = parts["state"]["image.0.weight"]["exp_avg"]
        held = sum(shard.tensor.numel() for shard in own.local_shards())
        before = [kept["exp_avg"].clone() for kept in optimizer.state.values()]
        fsdp.optim_state_dict_to_load(net, optimizer, parts, load_directly=True)
    after = [kept["exp_avg"] for kept in optimizer.state.values()]
    far = max((a - b).abs().max().item() for a, b in zip(after, before, strict=True))
    assert len(numbered["state"]) == len(list(dense.parameters()))
    return apart(flat(named["state"]), flat(full["state"])), far, held


def test_full_rekeyed_and_sharded_state_of_a_model_with_collectives(processes: Processes) -> None:
    found = processes(2)(legacy)
    assert all(far == 0 and loaded == 0 for far, loaded, _ in found)
    held = [numbers for *_, numbers in found]
    assert sum(held) == 5 * 8
    assert max(held) < 5 * 8


# ---- Random models ---------------------------------------------------------------------------------------------------


def drawn(seed: int) -> dict[str, Any]:
    """A model, a way to shard it, and a way to train it."""
    draw = random.Random(seed)
    return {
        "depth": draw.choice([1, 2, 3]),
        "norm": draw.choice(["SyncBatchNorm", "LayerNorm"]),
        "gather": draw.choice(["R", "scan", "none"]),
        "loss": draw.choice(["clip", "siglip", "vic_reg", "rows"]),
        "wrapped": draw.choice(["FSDP1", "FSDP1", "FSDP2"]),
        "strategy": draw.choice(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]),
        "original": draw.random() < 0.5,
        "units": [draw.random() < 0.6 for _ in range(3)],
        "reshard": draw.random() < 0.5,
        "micro": [draw.choice([(4, 3), (1, 6), (7, 0)]) for _ in range(draw.choice([1, 2, 3]))],
        "checkpoint": draw.random() < 0.3,
    }


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.norm = gm.nn.SyncBatchNorm(4) if config["norm"] == "SyncBatchNorm" else nn.LayerNorm(4)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.tanh(self.norm(self.up(x)))
        if self.config["gather"] == "R":
            return made + gm.all_gather(made, sizes="auto").square().mean(0)
        if self.config["gather"] == "scan":
            behind = gm.exscan(made.sum(0), reverse=True)  # the sum of each row and all behind it
            return made + (made.flip(0).cumsum(0).flip(0) + behind) / ROWS
        return made


class Random(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["depth"]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            # A checkpoint runs a norm a second time, which would move its statistics again.
            again = self.config["checkpoint"] and self.config["norm"] == "LayerNorm"
            x = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        return x


def value(config: dict[str, Any], y: Tensor, x: Tensor) -> Tensor:
    """The loss of all ranks' rows, the same on every rank."""
    if config["loss"] == "clip":
        return gm.nn.clip_loss(y, x, 3.0, dst=gm.R)
    if config["loss"] == "siglip":
        return gm.nn.siglip_loss(y, x, 3.0, -1.0, dst=gm.R)
    if config["loss"] == "vic_reg":
        return gm.nn.vic_reg_loss(y, x, dst=gm.R)
    return gm.all_reduce((y * x.roll(1, 1)).sin().sum(), dst=gm.R) / ROWS


def random_steps(seed: int, dense: bool) -> Trained:
    config = drawn(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Random(config).double()
    net: nn.Module = made
    units = [layer for layer, is_one in zip(made.layers, config["units"], strict=False) if is_one]
    if not dense and config["wrapped"] == "FSDP2":
        for unit in (*units, net):
            fully_shard(unit, mesh=gm.mesh(dp=-1), reshard_after_forward=config["reshard"])
    elif not dense:
        net = FullyShardedDataParallel(
            net,
            auto_wrap_policy=CustomPolicy(lambda module: any(module is unit for unit in units)),
            sharding_strategy=ShardingStrategy[config["strategy"]],
            use_orig_params=config["original"],
            device_id=torch.device("cpu"),
        )
    optimizer = SGD(net.parameters())
    values = []
    for step in range(2):
        optimizer.zero_grad()
        for part, sizes in enumerate(config["micro"]):
            rows = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(10 * step + part)).double()
            own = rows[gm.axis().slice(sizes if gm.world_size() == 2 else ROWS)]
            with passing(net, part == len(config["micro"]) - 1):
                loss = gm.objective(
                    value(config, net(own), own), loss_type=gm.R, ddp=net, steps=len(config["micro"])
                )
                loss.backward()
            values.append(loss.item())
        optimizer.step()
    return values, left(net, optimizer)


def random_programs(seeds: range) -> list[Trained]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends DDP in place of NO_SHARD
        return [random_steps(seed, gm.world_size() == 1) for seed in seeds]


def holds(seeds: range, worlds: Any) -> None:
    alone = gm.launch(random_programs, 1, backend="threads", args=(seeds,))[0]
    for found in worlds(2, "gloo", 240).run(random_programs, seeds):
        for seed, (figures, kept), (values, right) in zip(seeds, found, alone, strict=True):
            assert figures == pytest.approx(values, rel=1e-10), drawn(seed)
            assert apart(kept, right) < 1e-10, drawn(seed)


def test_random_models_in_random_wrappers(worlds: Any) -> None:
    holds(range(12), worlds)


@pytest.mark.slow
def test_many_random_models_in_random_wrappers(worlds: Any) -> None:
    holds(range(100, 250), worlds)
