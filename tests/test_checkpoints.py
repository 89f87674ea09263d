"""Checkpoints of sharded models: saved over some ranks, loaded over others, and the training goes on as without."""

from __future__ import annotations

import copy
import importlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradmesh as gm

Run = Callable[..., list[Any]]
Threads = Callable[[int], Run]
State = dict[str, Tensor]
checkpoint: Any = torch.distributed.checkpoint


@dataclass(frozen=True)
class Program:
    """A model and its ranks.

    Attributes:
        seed: of the values.
        before: the ranks that save.
        after: the ranks that load.
        width: of the vectors.
        hidden: of the layer between.
        words: of the table; 0: there is none.
        experts: their number; 0: there are none.
        sequence: whether rows are sharded between the linear layers.
        optimizer: its name.
    """

    seed: int
    before: int = 2
    after: int = 3
    width: int = 3
    hidden: int = 7
    words: int = 5
    experts: int = 5
    sequence: bool = True
    optimizer: str = "AdamW"


def random_program(seed: int) -> Program:
    """A program drawn from a seed."""
    draw = random.Random(seed)
    sequence = draw.random() < 0.7
    return Program(
        seed,
        before=draw.choice([1, 2, 3, 4]),
        after=draw.choice([1, 2, 3, 4]),
        width=draw.choice([2, 3, 4]),
        hidden=draw.choice([1, 3, 7, 8]),
        words=draw.choice([0, 2, 5, 9]),
        experts=draw.choice([0, 1, 2, 5]) if sequence else 0,
        sequence=sequence,
        optimizer=draw.choice(["AdamW", "AdamW", "SGD", "Adagrad", "RMSprop"]),
    )


Sizes = dict[str, tuple[int, ...]]
"""Each rank's hidden features and experts; an even split where one is not given."""


def random_sizes(program: Program, ranks: int) -> Sizes:
    """Any split of the hidden features, or of the experts, or of both; ranks may have none."""
    draw, found = random.Random(10 * program.seed + ranks), Sizes()
    for name, total in (("hidden", program.hidden), ("experts", program.experts)):
        if draw.random() < 0.5:
            ends = [0, *sorted(draw.randint(0, total) for _ in range(ranks - 1)), total]
            found[name] = tuple(b - a for a, b in itertools.pairwise(ends))
    return found


def filled(module: nn.Module, seed: int) -> nn.Module:
    """The module in float64 with the values of a seed."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.double().parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return module


class Model(nn.Module):
    """The dense model; `experts` are a layer of torch's, which is only held."""

    def __init__(self, program: Program, seed: int = 0) -> None:
        super().__init__()
        width = program.width
        self.table = filled(nn.Embedding(program.words, width), seed) if program.words else None
        self.up, self.down = (
            filled(nn.Linear(width, program.hidden), seed + 1),
            filled(nn.Linear(program.hidden, width), seed + 2),
        )
        self.moe: Any = None
        if program.experts:
            self.moe = nn.Module()
            self.moe.router = filled(nn.Linear(width, program.experts), seed + 4)
            self.moe.experts = nn.ModuleList(
                filled(nn.Linear(width, width), seed + 5 + n) for n in range(program.experts)
            )
        self.norm = filled(nn.LayerNorm(width), seed + 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.down(torch.tanh(self.up(x))))
        return x if self.moe is None else x + self.moe(x)


def sharded(program: Program, seed: int = 0, sizes: Sizes | None = None) -> Any:
    """The same model, sharded over all ranks."""
    net, given = Model(program, seed), sizes or {}
    if program.experts:
        router, experts = gm.nn.Replicated(net.moe.router), net.moe.experts
        k = min(2, program.experts)
        net.moe = gm.nn.ExpertParallel(router, lambda n: experts[n], given.get("experts", program.experts), k)
    styles: dict[str, Any] = {"up": "column", "down": "row"}
    styles |= {"table": "vocab"} if program.words else {}
    styles |= {"norm": "replicated"} if program.sequence else {}
    rows: Any = {"sequence_dim": 0, "rows": "balanced"} if program.sequence else {}
    hidden = dict.fromkeys(("up", "down"), given["hidden"]) if "hidden" in given else None
    return gm.nn.tensor_parallel(net, styles, sizes=hidden, **rows)


def optimizer_of(program: Program, net: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    options = {"momentum": 0.9} if program.optimizer == "SGD" else {"eps": 1e-2}
    made: torch.optim.Optimizer = getattr(torch.optim, program.optimizer)(
        net.named_parameters(), rate, **options
    )
    return made


def step(program: Program, net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
    draw = torch.Generator().manual_seed(100 * program.seed + number)
    x = torch.randn(6, program.width, generator=draw, dtype=torch.float64)
    x = gm.shard(x) if program.sequence else x
    if program.words:
        x = x + net.table(torch.randint(0, program.words, (6,), generator=draw))
    optimizer.zero_grad()
    net(x).square().mean().mul(len(x) / 6).backward()
    optimizer.step()


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": gm.nn.sharded_state_dict(net), "optimizer": gm.nn.sharded_state_dict(net, optimizer)}


def dense(net: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in gm.nn.dense_state_dict(net).items()}


def saving(program: Program, folder: str, sizes: Sizes | None = None) -> tuple[State, State]:
    """Two steps, the checkpoint, and a third step: what is saved, and what the training comes to."""
    net = sharded(program, sizes=sizes)
    optimizer = optimizer_of(program, net)
    step(program, net, optimizer, 1)
    step(program, net, optimizer, 2)
    optimizer.param_groups[0]["lr"] = 0.03
    checkpoint.save(state_of(net, optimizer), checkpoint_id=folder)
    saved = dense(net)
    step(program, net, optimizer, 3)
    return saved, dense(net)


def loading(program: Program, folder: str, sizes: Sizes | None = None) -> tuple[State, State]:
    """The checkpoint in a model of other values, and the third step."""
    net = sharded(program, seed=50, sizes=sizes)
    optimizer = optimizer_of(program, net, rate=0.7)
    gm.nn.load_sharded_state_dict(state_of(net, optimizer), folder)
    assert optimizer.param_groups[0]["lr"] == 0.03
    loaded = dense(net)
    step(program, net, optimizer, 3)
    return loaded, dense(net)


def compare(program: Program, before: list[tuple[State, State]], after: list[tuple[State, State]]) -> None:
    names = list(Model(program).state_dict())
    assert any(list(saved) == names for saved, _ in before)  # on a rank with experts
    for saved, trained in before:
        assert sorted(saved) == sorted(names)
        for loaded, resumed in after:
            assert all(torch.equal(loaded[name], saved[name]) for name in names)
            for name in names:
                if len(before) == len(after):
                    assert torch.equal(resumed[name], trained[name]), name
                else:  # sums over other numbers of ranks have other last digits
                    torch.testing.assert_close(resumed[name], trained[name], rtol=1e-9, atol=1e-11)
    assert not torch.equal(before[0][0]["up.weight"], before[0][1]["up.weight"])


@pytest.mark.parametrize("seed", range(16))
def test_training_goes_on_over_another_number_of_ranks(threads: Threads, tmp_path: Path, seed: int) -> None:
    program = random_program(seed)
    before, after = (
        threads(ranks)(run, program, str(tmp_path), random_sizes(program, ranks))
        for ranks, run in ((program.before, saving), (program.after, loading))
    )
    compare(program, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 200))
def test_training_goes_on_over_another_number_of_ranks_at_random(
    threads: Threads, tmp_path: Path, seed: int
) -> None:
    test_training_goes_on_over_another_number_of_ranks(threads, tmp_path, seed)


@pytest.mark.parametrize("ranks", [(2, 4), (3, 2), (2, 1), (2, 2)])
def test_training_goes_on_over_processes(
    processes: Callable[[int], Run], tmp_path: Path, ranks: tuple[int, int]
) -> None:
    program = Program(7)
    before = processes(ranks[0])(saving, program, str(tmp_path))
    compare(program, before, processes(ranks[1])(loading, program, str(tmp_path)))


def test_ranks_may_have_no_shard_and_no_experts(threads: Threads, tmp_path: Path) -> None:
    program = Program(8, words=2)
    given = {"hidden": (0, 3, 0, 4), "experts": (0, 3, 0, 2)}, {"hidden": (7, 0, 0), "experts": (4, 0, 1)}
    before = threads(4)(saving, program, str(tmp_path), given[0])
    compare(program, before, threads(3)(loading, program, str(tmp_path), given[1]))


def test_ranks_that_are_threads_do_not_change_each_others_names(
    threads: Threads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch sets a global while a rank looks for the names of torch 2.3, in which others saw their names changed."""
    planner: Any = importlib.import_module("torch.distributed.checkpoint.default_planner")
    flatten, program = planner.flatten_state_dict, Program(10)
    before = threads(3)(saving, program, str(tmp_path))
    looked = []

    def slowly(state: dict[str, Any]) -> Any:
        old = planner._version._derived_version
        looked.append(old)
        time.sleep(0.3 if old else 0.1 * gm.rank())
        return flatten(state)

    monkeypatch.setattr(planner, "flatten_state_dict", slowly)
    compare(program, before, threads(3)(loading, program, str(tmp_path)))
    assert looked.count("2_3") == 3


def test_options_that_a_checkpoint_does_not_have_keep_their_values(threads: Threads, tmp_path: Path) -> None:
    def run(load: bool) -> tuple[float, float]:
        net = gm.nn.ColumnParallelLinear(3, 4)
        optimizer = torch.optim.SGD(net.parameters(), 0.5 if load else 0.1, momentum=0.9 if load else 0.8)
        state = state_of(net, optimizer)
        if load:
            gm.nn.load_sharded_state_dict(state, tmp_path)
        else:
            del state["optimizer"]["param_groups"][0]["momentum"]
            checkpoint.save(state, checkpoint_id=tmp_path)
        group = optimizer.param_groups[0]
        return group["lr"], group["momentum"]

    threads(2)(run, False)
    assert threads(3)(run, True) == [(0.1, 0.9)] * 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_is_that_of_the_dense_model(threads: Threads, tmp_path: Path) -> None:
    """One process without a process group loads it, by gradmesh or by torch alone, and saves one that ranks load."""
    program = Program(9)
    saved = threads(3)(saving, program, str(tmp_path / "a"))[0][0]
    one: Any = Model(program, seed=60)
    plain: Any = {"model": one.state_dict()}
    checkpoint.load(plain, checkpoint_id=tmp_path / "a", no_dist=True)
    assert all(torch.equal(value, saved[name]) for name, value in plain["model"].items())

    optimizer = optimizer_of(program, one)
    state = state_of(one, optimizer)
    gm.nn.load_sharded_state_dict(state, tmp_path / "a", no_dist=True)
    assert optimizer.param_groups[0]["lr"] == 0.03
    assert optimizer.state[one.up.weight]["exp_avg"].abs().sum() > 0
    checkpoint.save(state, checkpoint_id=tmp_path / "b", no_dist=True)
    for loaded, _ in threads(2)(loading, program, str(tmp_path / "b")):
        assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def _on_a_mesh(program: Program, folder: str, load: bool, dp: int) -> State:
    gm.mesh(dp=dp, tp=-1)
    net = Model(program, seed=50 * load)
    gm.nn.tensor_parallel(net, {"table": "vocab", "up": "column", "down": "row"}, "tp")
    replicas: Any = nn.parallel.DistributedDataParallel(net, process_group=gm.axis("dp").group)
    state = {"model": gm.nn.sharded_state_dict(replicas.module)}
    if load:
        gm.nn.load_sharded_state_dict(state, folder)
    else:
        checkpoint.save(state, checkpoint_id=folder)
    return dense(net)


def test_data_parallel_ranks_write_nothing_twice(processes: Callable[[int], Run], tmp_path: Path) -> None:
    program = Program(10, experts=0)
    expected = Model(program).state_dict()
    processes(4)(_on_a_mesh, program, str(tmp_path), False, 2)
    found = checkpoint.FileSystemReader(tmp_path).read_metadata()
    written = [(index.fqn, index.offset) for index in found.storage_data]
    assert (
        len(written) == len(set(written)) == len(expected) + 4
    )  # the table, two weights and a bias have two shards
    for each in processes(2)(_on_a_mesh, program, str(tmp_path), True, 1):
        assert all(torch.equal(each[name], value) for name, value in expected.items())


def _with_fsdp(program: Program, folder: str, load: bool, dp: int) -> State:
    mesh = gm.mesh(dp=dp, tp=-1)
    net = Model(program, seed=50 * load)
    gm.nn.tensor_parallel(net, {"table": "vocab", "up": "column", "down": "row"}, "tp")
    fully_shard(net, mesh=mesh["dp"])
    optimizer = optimizer_of(program, net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = state_of(net, optimizer)
    if load:
        gm.nn.load_sharded_state_dict(state, folder)
    else:
        checkpoint.save(state, checkpoint_id=folder)
    moments = {key: optimizer.state[each]["exp_avg"] for key, each in net.named_parameters()}
    return {
        name: value.full_tensor() for name, value in (*net.state_dict().items(), *moments.items())
    } | gm.nn.dense_state_dict(net)


def test_fully_shard_and_tensor_parallel_layers_share_a_checkpoint(
    processes: Callable[[int], Run], tmp_path: Path
) -> None:
    program = Program(11, experts=0, hidden=5)
    saved = processes(4)(_with_fsdp, program, str(tmp_path), False, 2)[0]
    for ranks, dp in ((4, 4), (2, 1)):
        for each in processes(ranks)(_with_fsdp, program, str(tmp_path), True, dp):
            assert all(torch.equal(each[name], value) for name, value in saved.items())


def _of_torch(folder: str) -> State:
    net = Model(Program(12, experts=0))
    mesh = gm.mesh(tp=-1)
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    checkpoint.save({"model": net.state_dict()}, checkpoint_id=folder)
    return {
        name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in net.state_dict().items()
    }


def _loaded(program: Program, folder: str) -> State:
    net = sharded(program, seed=50)
    gm.nn.load_sharded_state_dict({"model": gm.nn.sharded_state_dict(net)}, folder)
    return dense(net)


def test_a_checkpoint_of_dtensors_is_loaded(
    processes: Callable[[int], Run], threads: Threads, tmp_path: Path
) -> None:
    saved = processes(2)(_of_torch, str(tmp_path))[0]
    for each in threads(3)(_loaded, Program(12, experts=0), str(tmp_path)):
        assert all(torch.equal(each[name], value) for name, value in saved.items())


def _saved_meanwhile(program: Program, folder: str) -> State:
    net = sharded(program)
    optimizer = optimizer_of(program, net)
    step(program, net, optimizer, 1)
    saved, state = dense(net), state_of(net, optimizer)
    # What is copied has neither the dense size, nor the optimizer.
    assert state["model"]["up.weight"].new_empty([], device="cpu").is_meta
    assert type(copy.deepcopy(state["optimizer"]["param_groups"][0])) is dict
    pending: Any = checkpoint.async_save(state, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    pending.result()
    return saved


def test_asynchronous_saving_takes_the_values_of_its_call(
    processes: Callable[[int], Run], threads: Threads, tmp_path: Path
) -> None:
    program = Program(13)
    saved = processes(2)(_saved_meanwhile, program, str(tmp_path))[0]
    for each in threads(3)(_loaded, program, str(tmp_path)):
        assert all(torch.equal(each[name], value) for name, value in saved.items())


class Odd(nn.Module):
    """An expert with buffers, a state that is not a tensor, and no parameters on odd numbers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(number))
        self.linear = None if number % 2 else filled(nn.Linear(3, 3, bias=False), number)
        self.note = f"expert {number}"

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


@pytest.mark.parametrize("sizes", [(5,), (3, 2), (0, 4, 1), (2, 0, 3)])
def test_a_dense_state_has_the_experts_of_all_ranks(threads: Threads, sizes: tuple[int, ...]) -> None:
    whole = nn.ModuleDict({str(number): Odd(number) for number in range(5)})
    expected = {f"experts.{name}": value for name, value in whole.state_dict().items()}

    def through() -> tuple[dict[str, Any], list[str]]:
        layer = gm.nn.ExpertParallel(nn.Identity(), Odd, sizes, 1)
        state = gm.nn.dense_state_dict(layer)
        other = gm.nn.ExpertParallel(nn.Identity(), lambda number: Odd(number + 6), sizes, 1)
        gm.nn.load_dense_state_dict(other, state)
        assert all(
            torch.equal(value, state[name])
            for name, value in other.state_dict().items()
            if isinstance(value, Tensor)
        )
        notes: list[str] = [each.note for each in other.experts.values()]
        return state, notes

    results = threads(len(sizes))(through)
    assert [note for _, notes in results for note in notes] == [f"expert {number}" for number in range(5)]
    for state, _ in results:
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert torch.equal(state[name], value) if isinstance(value, Tensor) else state[name] == value


def test_experts_of_tensor_parallel_layers_have_one_dense_state(threads: Threads, tmp_path: Path) -> None:
    """On a mesh of experts x tensor parallel ranks, in a module that is replicated over the second axis."""

    def expert(number: int) -> nn.Module:
        pair = filled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), number)
        return gm.nn.tensor_parallel(pair, {"0": "column", "2": "row"}, "tp")

    def model() -> nn.Module:
        return nn.ModuleDict(
            {"moe": gm.nn.ExpertParallel(gm.nn.Replicated(nn.Linear(3, 3), "ep"), expert, 3, 1, "ep")}
        )

    def saved() -> State:
        torch.manual_seed(0)
        gm.mesh(ep=2, tp=2)
        net = model()
        checkpoint.save(gm.nn.sharded_state_dict(net), checkpoint_id=tmp_path)
        return dense(net)

    def loaded() -> State:
        torch.manual_seed(1)
        gm.mesh(ep=3, tp=1)
        net = model()
        gm.nn.load_sharded_state_dict(gm.nn.sharded_state_dict(net), tmp_path)
        return dense(net)

    before, after = threads(4)(saved), threads(3)(loaded)
    right = filled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), 2).state_dict()
    assert len(before[0]) == 2 + 3 * 4
    for state in (*before, *after):
        assert list(state) == list(before[0])
        assert all(torch.equal(state[name], before[0][name]) for name in state)
        assert all(torch.equal(state[f"moe.experts.2.{name}"], value) for name, value in right.items())


def test_experts_in_experts_have_one_dense_state(threads: Threads) -> None:
    def expert(number: int) -> nn.Module:
        inner = [filled(nn.Linear(1, 1), 10 * number + n) for n in range(3)]
        return gm.nn.ExpertParallel(nn.Identity(), lambda n: inner[n], 3, 1, "inner")

    def run(outer: int) -> State:
        gm.mesh(outer=outer, inner=-1)
        return dense(gm.nn.ExpertParallel(nn.Identity(), expert, 3, 1, "outer"))

    (expected,) = threads(1)(run, 1)
    assert len(expected) == 3 * 3 * 2
    for state in threads(4)(run, 2):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)


def _refused(act: Callable[[], object]) -> str:
    with pytest.raises(gm.ArgumentError) as caught:
        act()
    return str(caught.value)


WHOLE = Model(Program(0)).state_dict()
DENSE = {
    "a missing name": (
        {n: v for n, v in WHOLE.items() if n != "down.bias"},
        'Missing key(s) in state_dict: "down.bias"',
    ),
    "an unexpected name": ({**WHOLE, "extra": torch.ones(1)}, "Unexpected key(s) in state_dict: "),
    "another shape": ({**WHOLE, "norm.bias": torch.ones(9)}, "size mismatch for norm"),
    "another width": (
        {**WHOLE, "up.weight": torch.ones(8, 3)},
        "'up.weight' does not have the dense layer's size",
    ),
    "fewer experts": (
        {name: value for name, value in WHOLE.items() if ".experts.4." not in name},
        "got       experts 0, 1, 2, 3",
    ),
    "more experts": (
        {**WHOLE, "moe.experts.5.weight": torch.ones(3, 3)},
        "got       experts 0, 1, 2, 3, 4, 5",
    ),
}


@pytest.mark.parametrize("what", DENSE)
def test_a_dense_state_that_does_not_fit_is_refused_on_every_rank(threads: Threads, what: str) -> None:
    state, words = DENSE[what]
    for text in threads(3)(lambda: _refused(lambda: gm.nn.load_dense_state_dict(sharded(Program(0)), state))):
        assert text.startswith("gradmesh.nn.load_dense_state_dict: ")
        assert words in text


def test_without_strict_experts_that_a_state_lacks_are_named(threads: Threads) -> None:
    further = {"moe.experts.0.extra": torch.ones(1), "moe.experts.5.weight": torch.ones(3, 3)}
    state = {**WHOLE, **further}
    del state["moe.experts.4.bias"]

    def tried() -> tuple[list[str], list[str]]:
        result = gm.nn.load_dense_state_dict(sharded(Program(0)), state, strict=False)
        return result.missing_keys, sorted(result.unexpected_keys)

    expected: Any = [([], [*further]), (["moe.experts.4.bias"], ["moe.experts.5.weight"])]
    assert threads(2)(tried) == expected


SHARDED = {
    "another width": (Program(0, hidden=8), "Size mismatch between saved torch.Size([7"),
    "fewer experts": (Program(0, experts=4), "Size mismatch between saved torch.Size([5"),
    "more experts": (Program(0, experts=6), "Size mismatch between saved torch.Size([5"),
    "no experts": (
        Program(0, experts=0),
        "tensors of the checkpoint are not in the state: model.moe.experts",
    ),
    "another optimizer": (
        Program(0, optimizer="SGD"),
        "tensors of the checkpoint are not in the state: optimizer.state.",
    ),
}


def test_a_sharded_parameter_with_a_parametrization_is_refused(threads: Threads) -> None:
    def tried() -> list[str]:
        net = nn.utils.parametrizations.weight_norm(gm.nn.ColumnParallelLinear(3, 4))
        return [_refused(partial(each, net)) for each in (gm.nn.dense_state_dict, gm.nn.sharded_state_dict)]

    for texts in threads(2)(tried):
        for text in texts:
            assert "'parametrizations.weight.original0' is a sharded parameter with a parametrization" in text


@pytest.mark.parametrize("what", SHARDED)
def test_a_checkpoint_that_does_not_fit_is_refused_on_every_rank(
    threads: Threads, tmp_path: Path, what: str
) -> None:
    program, words = SHARDED[what]
    threads(2)(saving, Program(0), str(tmp_path))

    def tried() -> str:
        net = sharded(program, seed=50)
        optimizer = optimizer_of(program, net)
        before = dense(net)
        text = _refused(lambda: gm.nn.load_sharded_state_dict(state_of(net, optimizer), tmp_path))
        assert all(torch.equal(value, before[name]) for name, value in dense(net).items())
        return text

    for text in threads(3)(tried):
        assert text.startswith("gradmesh.nn.load_sharded_state_dict: the checkpoint could not be loaded")
        assert words in text


def test_fewer_experts_are_refused_where_their_router_is_elsewhere(threads: Threads, tmp_path: Path) -> None:
    def layer(experts: int) -> dict[str, Any]:
        return gm.nn.sharded_state_dict(
            gm.nn.ExpertParallel(nn.Identity(), lambda _: nn.Linear(1, 1), experts, 1)
        )

    threads(2)(lambda: checkpoint.save(layer(5), checkpoint_id=tmp_path))
    for text in threads(2)(lambda: _refused(lambda: gm.nn.load_sharded_state_dict(layer(4), tmp_path))):
        assert "2 tensors of the checkpoint are not in the state: experts.4." in text


def test_a_rank_that_alone_does_not_fit_is_reported_by_all(
    processes: Callable[[int], Run], tmp_path: Path
) -> None:
    for text in processes(2)(_one_differs, str(tmp_path)):
        assert "got       rank 1: Missing key in checkpoint state_dict: model.1.weight." in text


def _one_differs(folder: str) -> str:
    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    checkpoint.save({"model": {"0.weight": layers[0].weight.data}}, checkpoint_id=folder)
    state = {f"{number}.weight": layers[number].weight.data for number in range(1 + gm.rank())}
    return _refused(lambda: gm.nn.load_sharded_state_dict({"model": state}, folder))


def test_a_checkpoint_that_is_not_there_is_refused(threads: Threads, tmp_path: Path) -> None:
    state = {"model": {"a": torch.ones(1)}}
    for text in threads(2)(lambda: _refused(lambda: gm.nn.load_sharded_state_dict(state, tmp_path / "none"))):
        assert any(cause in text for cause in ("metadata is None", "rank 0: AssertionError()"))  # torch 2.9's


def test_optimizers_that_cannot_be_sharded_are_refused(threads: Threads) -> None:
    def tried() -> list[str]:
        net, other = gm.nn.ColumnParallelLinear(3, 4), nn.Linear(2, 2)
        factored = torch.optim.Adafactor(net.parameters())
        return [
            _refused(lambda: gm.nn.sharded_state_dict(net, factored)),
            _refused(lambda: gm.nn.sharded_state_dict(net, torch.optim.SGD(other.parameters(), 0.1))),
        ]

    for factored, unknown in threads(2)(tried):
        assert "the optimizer's state of 'weight' cannot be sharded as the parameter is" in factored
        assert "the optimizer has a parameter that is not in the module" in unknown
        assert "got       2 other parameters, of shapes [[2, 2], [2]]" in unknown


def test_the_state_of_an_optimizer_before_its_first_step_changes_nothing(threads: Threads) -> None:
    def tried() -> bool:
        net = sharded(Program(3))
        optimizer, before = optimizer_of(Program(3), net), dense(net)
        gm.nn.sharded_state_dict(net, optimizer)
        untouched = all(each.grad is None for each in net.parameters())
        return untouched and all(torch.equal(value, before[name]) for name, value in dense(net).items())

    assert all(threads(2)(tried))


def test_a_parameter_without_a_gradient_has_no_state_after_loading_either(
    threads: Threads, tmp_path: Path
) -> None:
    def run(load: bool) -> int:
        net = gm.nn.tensor_parallel(
            filled(nn.Sequential(nn.Linear(3, 4), nn.Linear(3, 4)), 0), {"?": "column"}
        )
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
        if not load:
            net[0](torch.ones(1, 3).double()).sum().backward()  # type: ignore[index]
            optimizer.step()
        state = state_of(net, optimizer)
        if load:
            gm.nn.load_sharded_state_dict(state, tmp_path)
        else:
            checkpoint.save(state, checkpoint_id=tmp_path)
        return len([each for each in optimizer.state.values() if each])

    assert threads(2)(run, False) == [2, 2]
    assert threads(3)(run, True) == [2, 2, 2]


def test_a_dense_state_goes_through_safetensors(threads: Threads, tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    program, path = Program(4), str(tmp_path / "model.safetensors")

    def saved() -> State:
        state = gm.nn.dense_state_dict(sharded(program))
        if gm.rank() == 0:
            torch_files.save_file(state, path)
        return state

    def loaded() -> State:
        net = sharded(program, seed=50)
        gm.nn.load_dense_state_dict(net, torch_files.load_file(path))
        return dense(net)

    expected = Model(program).state_dict()
    for state in (*threads(2)(saved), *threads(3)(loaded), torch_files.load_file(path)):
        assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_shards_are_written_as_one_safetensors_file(processes: Callable[[int], Run], tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    program = Program(5)
    processes(2)(_as_safetensors, program, str(tmp_path))
    found = torch_files.load_file(tmp_path / "model-00001-of-00001.safetensors")
    expected = Model(program).state_dict()
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _as_safetensors(program: Program, folder: str) -> None:
    state = gm.nn.sharded_state_dict(sharded(program))
    writer = checkpoint.HuggingFaceStorageWriter(
        folder,
        dict.fromkeys(Model(program).state_dict(), 1),
        save_distributed=True,
        enable_consolidation=True,
    )
    checkpoint.save(state, storage_writer=writer)


def test_a_pretrained_model_of_transformers_is_loaded_in_parts(threads: Threads, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch_files = pytest.importorskip("safetensors.torch")
    sizes = {"hidden_size": 8, "intermediate_size": 14, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=19, num_hidden_layers=1, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    ids = torch.arange(6).view(1, 6)
    expected = model(ids).logits.detach()
    styles: Any = {"*.gate_proj": "column", "*.up_proj": "column", "*.down_proj": "row"}
    styles |= {"*.embed_tokens": "vocab", "lm_head": "column, gathered"}

    def found() -> tuple[Tensor, bool]:
        torch.manual_seed(1)
        net = gm.nn.tensor_parallel(transformers.LlamaForCausalLM(config).eval(), styles)
        gm.nn.load_dense_state_dict(net, torch_files.load_file(tmp_path / "model.safetensors"))
        whole = gm.nn.dense_state_dict(net)
        return net(ids).logits.detach(), all(
            torch.equal(whole[name], value) for name, value in model.state_dict().items()
        )

    for logits, same in threads(3)(found):
        assert same
        torch.testing.assert_close(logits, expected)
