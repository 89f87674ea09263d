"""The potential on one process, its data, and the page that shows how it was made parallel."""

from __future__ import annotations

import difflib
import random
import re
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.emt import EMT
from ase.neighborlist import neighbor_list
from gradmesh_demos.forces import parallel, single, structures
from gradmesh_demos.forces.layers import CUTOFF, copied
from gradmesh_demos.forces.structures import Figures, batch_of, neighbours
from gradmesh_demos.forces.training import fitted, loss_of
from torch import Tensor

import gradmesh as gm
from tests.forces_programs import structure_of

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model() -> single.Potential:
    return single.Potential(3, seed=2)


def figures_of(model: single.Potential, atoms: Atoms) -> Figures:
    return single.figures(model, batch_of([atoms], CUTOFF)[0])


def shaken(seed: int = 0) -> Atoms:
    atoms = bulk("Cu", cubic=True).repeat((2, 1, 1))
    atoms.symbols[[1, 2]] = ["O", "Au"]
    atoms.rattle(0.2, seed=seed)
    return atoms


def turned(atoms: Atoms) -> tuple[Atoms, np.ndarray]:
    """The structure turned and mirrored, moved, and its atoms in another order; and the turn."""
    turn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))
    made = atoms[::-1]
    made.set_cell(atoms.cell.array @ turn.T)
    made.positions = made.positions @ turn.T + [1.0, 2.0, 3.0]
    return made, turn


def test_forces_and_stresses_turn_with_the_structure(model: single.Potential) -> None:
    atoms = shaken()
    other, turn = turned(atoms)
    one, two, matrix = figures_of(model, atoms), figures_of(model, other), torch.from_numpy(turn)
    assert torch.allclose(one.energy, two.energy, rtol=0, atol=1e-12)
    assert torch.allclose((one.forces @ matrix.T).flip(0), two.forces, rtol=0, atol=1e-12)
    assert torch.allclose(matrix @ one.stress @ matrix.T, two.stress, rtol=0, atol=1e-12)
    assert float(one.forces.abs().max()) > 1e-3 < float(one.stress.abs().max()) * 1e3
    assert torch.allclose(one.stress, one.stress.mT, rtol=0, atol=1e-14)


def test_forces_and_stresses_are_slopes_of_the_energy(model: single.Potential) -> None:
    atoms, step = shaken(), 1e-4
    found = figures_of(model, atoms)

    def slope(moved: list[Atoms]) -> float:
        up, down = (figures_of(model, each).energy.item() for each in moved)
        return (up - down) / (2 * step)

    for atom, dim in ((1, 0), (2, 2)):
        moved = [atoms.copy(), atoms.copy()]
        for each, sign in zip(moved, (1, -1), strict=True):
            each.positions[atom, dim] += sign * step
        assert slope(moved) == pytest.approx(-found.forces[atom, dim].item(), abs=1e-7)
    for one, other in ((0, 0), (1, 2)):
        moved = [atoms.copy(), atoms.copy()]
        for each, sign in zip(moved, (1, -1), strict=True):
            strain = np.eye(3)
            strain[one, other] += sign * step
            each.set_cell(each.cell.array @ strain.T, scale_atoms=True)
        right = found.stress[0, one, other].item() * atoms.cell.volume
        assert slope(moved) == pytest.approx(right, abs=1e-6)


def test_a_batch_has_the_figures_of_its_structures_and_a_supercell_those_of_its_cell(
    model: single.Potential,
) -> None:
    several = [shaken(), Atoms("O"), structures.slab(12, layers=2), Atoms("Au2", [[0, 0, 0], [0, 0, 2.4]])]
    together = single.figures(model, batch_of(several, CUTOFF)[0])
    alone = [figures_of(model, atoms) for atoms in several]
    assert torch.allclose(together.energy, torch.cat([each.energy for each in alone]), atol=1e-12)
    assert torch.allclose(together.forces, torch.cat([each.forces for each in alone]), atol=1e-12)
    assert torch.allclose(together.stress, torch.cat([each.stress for each in alone]), atol=1e-12)
    assert together.stress[1].abs().max() == together.stress[3].abs().max() == 0
    cell = bulk("Cu")
    one, eight = figures_of(model, cell), figures_of(model, cell.repeat(2))
    assert eight.energy.item() == pytest.approx(8 * one.energy.item(), rel=1e-12)
    assert torch.allclose(one.stress, eight.stress, atol=1e-12)


def test_the_energy_goes_smoothly_through_the_cutoff(model: single.Potential) -> None:
    def forces(distance: float, cutoff: float) -> Tensor:
        batch, _ = batch_of([Atoms("Cu2", [[0, 0, 0], [0, 0, distance]])], cutoff)
        return single.figures(model, batch).forces

    for distance in (CUTOFF - 1e-4, CUTOFF - 1e-9, CUTOFF + 1e-9, CUTOFF + 0.2):
        assert float(forces(distance, CUTOFF + 0.3).abs().max()) < 1e-6
    assert torch.equal(forces(4.0, CUTOFF), forces(4.0, CUTOFF + 0.3))


def test_neighbours_are_those_of_ase() -> None:
    draw = random.Random(0)
    for _ in range(60):
        atoms = structure_of(draw)
        edges, offsets = neighbours(atoms, CUTOFF)
        source, target, apart = neighbor_list("jiD", atoms, CUTOFF)
        places = torch.from_numpy(atoms.positions)
        found = torch.cat((edges.T, (places[edges[0]] + offsets - places[edges[1]])), dim=1)
        right = np.column_stack((source, target, apart)) if len(source) else np.zeros((0, 5))
        assert sorted(np.round(found.numpy(), 6).tolist()) == sorted(np.round(right, 6).tolist())


def test_structures_are_emts_of_all_families_and_the_same_each_time(tmp_path: Path) -> None:
    made, again, other = structures.made(8, 1), structures.made(12, 1), structures.made(4, 2)
    assert [atoms.info["family"] for atoms in made] == 2 * list(structures.FAMILIES)
    for one, two in zip(made, again, strict=False):
        assert np.array_equal(one.positions, two.positions)
        assert one.get_potential_energy() == two.get_potential_energy()
    assert not np.array_equal(made[0].positions.ravel()[:9], other[0].positions.ravel()[:9])
    fresh = made[1].copy()
    fresh.calc = EMT()
    assert np.array_equal(fresh.get_forces(), made[1].get_forces())
    batch, right = batch_of(made[:4], CUTOFF)
    assert right.stress[1].numpy() == pytest.approx(made[1].get_stress(voigt=False))
    assert batch.volumes.isfinite().tolist() == [True, True, False, True]
    structures.write(tmp_path / "made.xyz", 4, 1)
    read = ase.io.read(tmp_path / "made.xyz", ":")
    assert [atoms.get_potential_energy() for atoms in read] == pytest.approx(right.energy.tolist())


def test_elements_alone_fit_the_energies_before_training() -> None:
    made = structures.made(8, 1)
    batch, right = batch_of(made, CUTOFF)
    model = single.Potential(2)
    before = loss_of(single.figures(model, batch), right, batch)
    after = loss_of(single.figures(fitted(model, made), batch), right, batch)
    assert after.item() < before.item()


def test_copy_has_equal_but_separate_weights(model: single.Potential) -> None:
    made = copied(model)
    for one, other in zip(model.parameters(), made.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.data_ptr() != other.data_ptr()
    # What threads share of a model must not be what one of them trains.
    assert sum(each.numel() for each in made.parameters()) > 400


NOWHERE = Atoms("Cu2", [[0, 0, 0], [0, 0, np.nan]])
TOGETHER = Atoms("OCuAu", [[0, 0, 0], [0, 0, 2], [0, 0, 2]])
OWN_IMAGE = Atoms("Cu2", [[0, 0, 0], [0, 0, 3]], cell=[3, 3, 3], pbc=True)
FLAT = Atoms("Cu", cell=[[3, 0, 0], [0, 3, 0], [3, 3, 0]], pbc=True)


@pytest.mark.parametrize(
    ("several", "text"),
    [
        ([NOWHERE], "non-finite atomic positions"),
        ([Atoms("O"), TOGETHER], "atoms [12] and [12]"),
        ([OWN_IMAGE], "atoms [01] and [01]"),
        ([FLAT], "no volume"),
        ([Atoms("Cu", pbc=True)], "no volume"),
        ([Atoms("CuAg", [[0, 0, 0], [0, 0, 2]])], "got +Ag"),
        ([], "cannot make a batch of zero structures"),
    ],
)
def test_structures_that_would_have_no_forces_are_refused(several: list[Atoms], text: str) -> None:
    with pytest.raises(gm.ArgumentError, match=text):
        batch_of(several, CUTOFF)


def test_a_model_of_another_dtype_is_refused(model: single.Potential) -> None:
    with pytest.raises(gm.DTypeError, match=r"expected +torch.float64\n +got +torch.float32"):
        figures_of(copied(model).float(), shaken())


def test_structures_without_atoms_and_without_edges_have_figures(model: single.Potential) -> None:
    none, one = figures_of(model, Atoms()), figures_of(model, Atoms("O"))
    assert (none.energy.item(), none.forces.shape) == (0, (0, 3))
    assert one.energy.item() != 0
    assert float(one.forces.abs().max()) == float(one.stress.abs().max()) == 0


def test_page_shows_the_difference_between_one_process_and_ranks() -> None:
    one, other = (Path(module.__file__ or "") for module in (single, parallel))
    before, after = (file.read_text().splitlines() for file in (one, other))
    lines = difflib.unified_diff(before, after, one.name, other.name, lineterm="")
    (shown,) = re.findall(r"```diff\n(.*?)\n```", (ROOT / "docs" / "forces.md").read_text(), re.DOTALL)
    assert shown.splitlines() == list(lines)
    changed = [line for line in shown.splitlines()[2:] if line.startswith("+") and line.strip("+ ")]
    assert len(changed) < 20
