"""The potential on ranks is that of one process: random structures and partitions, training, dynamics, the audit."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.calculator import PropertyNotImplementedError
from gradmesh_demos.forces import Job, parallel, single, structures
from gradmesh_demos.forces.dynamics import RankCalculator, md_on_rank, started
from gradmesh_demos.forces.layers import CUTOFF, OncePlan, copied
from gradmesh_demos.forces.structures import batch_of
from gradmesh_demos.forces.training import (
    Learner,
    deviations,
    fitted,
    samples_of,
    train,
    train_on_rank,
    trained,
)
from gradmesh_demos.runner import Watcher

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_count
from tests.conftest import Run
from tests.forces_programs import held, models, random_program, sample_of, verdicts
from tests.seldom import seldom

Ranks = Callable[[int], Run]


@pytest.mark.parametrize("ranks", seldom([1, 2, 3, 4], [2, 3]))
def test_random_structures_and_partitions_are_right_or_refused_on_every_rank(
    ranks: int, threads: Ranks
) -> None:
    seeds = list(range(100 * ranks, 100 * ranks + 12))
    models()
    assert verdicts(seeds, threads(ranks)(held, seeds)) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_many_random_structures_and_partitions_are_right_or_refused_on_every_rank(
    ranks: int, threads: Ranks
) -> None:
    models()
    for first in range(10_000 * ranks, 10_000 * ranks + 200, 50):
        seeds = list(range(first, first + 50))
        assert verdicts(seeds, threads(ranks)(held, seeds)) == []


def test_random_structures_contain_the_hard_cases() -> None:
    batches = [(random_program(seed, 4), sample_of(random_program(seed, 4))[0]) for seed in range(400, 480)]
    single_atoms = own_images = several = empty = 0
    for program, batch in batches:
        source, target = batch.edges
        single_atoms += int((torch.bincount(target, minlength=len(batch.kinds)) == 0).any())
        own_images += int((source == target).any())
        several += int(len(batch.edges.unique(dim=1).T) < len(source))
        empty += program.partition in ("one rank empty", "one rank has all")
    assert min(single_atoms, own_images, several, empty) > 5


SMALL = Job(ranks=4, backend="threads", steps=6, channels=2, structures=8, batch=4)


@pytest.mark.parametrize("partition", seldom(["space", "graphs"], ["space"]))
def test_training_on_ranks_is_training_on_one_process_step_by_step(partition: str) -> None:
    settings = Job(**{**vars(SMALL), "partition": partition})
    made = structures.made(8, seed=3)
    with gm.Ranks(4, backend="threads") as ranks:
        training = trained(ranks, made, settings, Watcher())
        sample = samples_of(made, 8, 1, seed=0)[0]
        far, once = deviations(ranks, training.model, training.dense, sample, partition)
    assert training.loss_error <= 1e-10
    assert training.param_error <= 1e-10
    assert training.rank_error == 0
    assert training.losses[-1] < training.losses[0]
    assert max(far.values()) <= 1e-10
    assert once > 1e-3


def test_training_without_second_derivatives_is_seen_to_go_elsewhere(threads: Ranks) -> None:
    made = structures.made(4, seed=5)
    samples = samples_of(made, 4, 3, seed=0)
    right = train(Learner(fitted(single.Potential(2), made), 3), samples)
    learner = Learner(fitted(parallel.Potential(2), made), 3)
    for once, least, most in ((False, 0.0, 1e-10), (True, 1e-4, torch.inf)):
        for _, trace in threads(3)(train_on_rank, learner, samples, "space", once):
            assert least <= float((trace.parameters - right.parameters).abs().max()) <= most
            # The first loss needs no gradient of parameters: it is right in either case.
            assert trace.losses[0] == pytest.approx(right.losses[0], rel=1e-12)


def _three_exchanges(kind: type[GraphPlan]) -> tuple[Any, torch.Tensor]:
    atoms = structures.slab(30, layers=3)
    batch, _ = batch_of([atoms], CUTOFF)
    plan = kind(batch.edges, by_count(len(batch.kinds), gm.world_size()))
    x = torch.randn(len(plan.own), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(gm.rank()))
    return plan.exchange, x


def test_the_audit_finds_nothing_in_the_exchange_and_something_without_a_second_derivative() -> None:
    assert gm.verify.audit(lambda: _three_exchanges(GraphPlan), world_size=2).findings == ()
    assert gm.verify.audit(lambda: _three_exchanges(OncePlan), world_size=2).findings != ()


# -- dynamics


def _model() -> parallel.Potential:
    model = parallel.Potential(2, seed=1)
    with torch.no_grad():
        list(model.readout.parameters())[-1].mul_(3)
    return model


def _moving() -> Atoms:
    atoms = bulk("Cu", cubic=True).repeat((2, 2, 1))
    atoms.symbols[[0, 5]] = "Au"
    return started(atoms, seed=0, kelvin=3000)


def _run(model: parallel.Potential, steps: int) -> tuple[np.ndarray, list[float], int, float]:
    atoms, found = md_on_rank(model, _moving(), steps)
    return atoms.positions, found.total, found.rebuilt, found.drift


def test_dynamics_on_ranks_are_those_of_one_rank_through_new_neighbour_lists(threads: Ranks) -> None:
    ((right, totals, lists, drift),) = threads(1)(_run, _model(), 30)
    assert lists > 0
    assert drift < 1e-3
    assert max(totals) > min(totals)
    parts = threads(3)(_run, _model(), 30)
    for places, others, number, _ in parts:
        assert number == lists
        assert np.abs(places - right).max() < 1e-9
        assert others == pytest.approx(totals, abs=1e-10)
        assert (places == parts[0][0]).all()


def _asked_twice(model: parallel.Potential) -> list[tuple[float, np.ndarray, np.ndarray, int]]:
    """What the calculator says of one structure, of a strained one, and of another with other elements."""
    calculator, said = RankCalculator(copied(model)), []
    for atoms in _three():
        atoms.calc = calculator
        said.append(
            (
                float(atoms.get_potential_energy()),
                atoms.get_forces(),
                atoms.get_stress(voigt=False),
                calculator.lists,
            )
        )
    return said


def _three() -> list[Atoms]:
    first, strained = _moving(), _moving()
    strained.set_cell(1.02 * first.cell.array, scale_atoms=True)
    other = _moving()
    other.symbols[3] = "O"
    return [first, strained, other]


def test_the_calculator_has_the_figures_of_one_process_when_cell_and_elements_change(threads: Ranks) -> None:
    model = _model()
    dense = single.Potential(2)
    dense.load_state_dict(model.state_dict())
    for said in threads(2)(_asked_twice, model):
        assert [lists for *_, lists in said] == [1, 2, 3]
        for atoms, (energy, forces, stress, _) in zip(_three(), said, strict=True):
            right = single.figures(dense, batch_of([atoms], CUTOFF)[0])
            assert energy == pytest.approx(right.energy.item(), abs=1e-10)
            assert np.abs(forces - right.forces.numpy()).max() < 1e-10
            assert np.abs(stress - right.stress[0].detach().numpy()).max() < 1e-10


def _asked_odd(model: parallel.Potential) -> list[tuple[float, np.ndarray, str]]:
    """What one calculator says of structures with ever other numbers of atoms, and no cell."""
    calculator, said = RankCalculator(copied(model)), []
    for atoms in (Atoms("Cu"), _moving(), Atoms("Cu2", [[0, 0, 0], [0, 0, 2.4]]), Atoms()):
        atoms.calc = calculator
        energy, forces = float(atoms.get_potential_energy()), atoms.get_forces()
        try:
            said.append((energy, forces, f"{len(atoms.get_stress())}"))
        except PropertyNotImplementedError as error:
            said.append((energy, forces, str(error)))
    return said


def test_the_calculator_takes_other_numbers_of_atoms_and_has_no_stress_without_a_cell(threads: Ranks) -> None:
    alone, (*_, last) = threads(1)(_asked_odd, _model())[0], threads(3)(_asked_odd, _model())
    for one, three in zip(alone, last, strict=True):
        assert one[0] == pytest.approx(three[0], abs=1e-10)
        assert np.abs(one[1] - three[1]).max(initial=0) < 1e-10
        assert one[2] == three[2]
    none = "stress not present in this calculation"
    assert [stress for *_, stress in alone] == [none, "6", none, none]


def _apart(model: parallel.Potential) -> str:
    atoms = _moving()
    atoms.positions[0, 0] += 1e-12 * (gm.rank() == 1)
    atoms.calc = RankCalculator(copied(model))
    with pytest.raises(gm.MismatchError, match="different values on rank 1 and on rank 0") as caught:
        atoms.get_forces()
    return str(caught.value).splitlines()[0]


def test_positions_that_differ_between_ranks_are_an_error_on_every_rank(threads: Ranks) -> None:
    said = threads(3)(_apart, _model())
    assert said == ["gradmesh.demo.forces.RankCalculator: the ranks' arguments differ"] * 3


def test_learner_resumes_after_a_copy_and_a_pickle() -> None:
    made = structures.made(4, seed=5)
    samples = samples_of(made, 2, 4, seed=0)
    whole = Learner(fitted(single.Potential(1), made), 4)
    right = train(whole, samples).parameters[-1]
    first = Learner(fitted(single.Potential(1), made), 4)
    train(first, samples[:2])
    for other in (first.copied(), pickle.loads(pickle.dumps(first)), first):
        assert torch.equal(train(other, samples[2:]).parameters[-1], right)


@pytest.mark.processes
def test_processes_train_as_one_process(processes: Ranks) -> None:
    made = structures.made(4, seed=5)
    samples = samples_of(made, 2, 2, seed=0)
    right = train(Learner(fitted(single.Potential(2), made), 2), samples)
    learner = Learner(fitted(parallel.Potential(2), made), 2)
    for _, trace in processes(2)(train_on_rank, learner, samples, "space"):
        assert float((trace.parameters - right.parameters).abs().max()) <= 1e-10
