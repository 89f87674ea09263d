"""Graph parallelism: train an interatomic potential on a partitioned copper slab, then run molecular dynamics.

python examples/forces_slab.py                                  # four local ranks
python examples/forces_slab.py --ranks 1                        # the same program on one rank
torchrun --nproc-per-node 4 examples/forces_slab.py             # ranks started by torchrun, on one machine or several

Needs pip install 'gradmesh[forces]'.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
from ase import Atoms, units
from ase.build import add_adsorbate, fcc111
from ase.calculators.emt import EMT
from ase.md.verlet import VelocityVerlet
from gradmesh_demos.forces.dynamics import RankCalculator, started
from gradmesh_demos.forces.layers import CUTOFF
from gradmesh_demos.forces.parallel import Potential, figures
from gradmesh_demos.forces.structures import Batch, Figures, batch_of, labelled
from gradmesh_demos.forces.training import Learner, fitted, loss_of

import gradmesh as gm
from gradmesh.nn.graph import GraphPlan, by_space


def slab(side: int) -> Atoms:
    """Six layers of copper, periodic along the surface, and an oxygen atom on it."""
    atoms = fcc111("Cu", (side, side, 6), a=3.61, vacuum=8.0)
    add_adsorbate(atoms, "O", 1.2, "fcc", offset=side // 2)
    return atoms


def shaken(atoms: Atoms, number: int) -> list[Atoms]:
    """The slab with its atoms displaced at random, each with EMT's energy, forces and stress."""
    made = []
    for draw in np.random.default_rng(0).spawn(number):
        one = atoms.copy()
        one.positions += draw.normal(scale=0.08, size=one.positions.shape)
        made.append(labelled(one))
    return made


def step(
    model: Potential, learner: Learner[Potential], plan: GraphPlan, batch: Batch, right: Figures
) -> float:
    """One step of training on energy, forces and stress: second derivatives across the ranks."""
    loss = loss_of(figures(model, plan, batch, second=True), right, batch)
    # Every rank gets the complete gradient, so all ranks take the same step.
    learner.learn(torch.autograd.grad(loss, list(model.parameters())))
    return loss.item()


def train(model: Potential, structures: list[Atoms], steps: int) -> list[float]:
    """Train with one structure per step; edges differ between structures, the partition is the same."""
    learner, samples = Learner(model, steps), [batch_of([atoms], CUTOFF) for atoms in structures]
    first = samples[0][0]
    cell = torch.from_numpy(structures[0].cell.array)
    plan = GraphPlan(first.edges, by_space(first.positions, gm.world_size(), cell=cell))
    plans = [plan.rebuilt(batch.edges) for batch, _ in samples]
    if gm.rank() == 0:
        share = plan.rows_sent / max(plan.rows_of_gather, 1)
        print(
            f"{len(first.kinds)} atoms, {first.edges.shape[1]} edges on {gm.world_size()} ranks; rank 0 owns"
        )
        print(f"{len(plan.own)} and sends {plan.rows_sent} rows, {share:.0%} of a whole gather's")
    return [
        step(model, learner, plans[number % len(plans)], *samples[number % len(plans)])
        for number in range(steps)
    ]


def main(side: int, structures: int, steps: int, md: int) -> dict[str, float]:
    """Run on every rank; returns the results, the same on every rank."""
    torch.set_num_threads(1)
    data = shaken(slab(side), structures + 1)
    model = fitted(Potential(channels=8), data)
    losses = train(model, data[:-1], steps)

    # An ASE calculator; every rank runs the same program.
    unseen = data[-1].copy()
    unseen.calc = RankCalculator(model)
    right = data[-1].get_forces()
    error = float(abs(unseen.get_forces() - right).mean())
    mean = float(abs(right - right.mean(0)).mean())

    atoms = started(slab(side), seed=0)
    atoms.calc = RankCalculator(model)
    before = atoms.get_total_energy()
    VelocityVerlet(atoms, timestep=2 * units.fs).run(md)
    drift = abs(float(atoms.get_total_energy() - before)) / len(atoms)
    reference = atoms.copy()
    reference.calc = EMT()
    after = float(abs(atoms.get_forces() - reference.get_forces()).mean())
    if gm.rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps")
        print(f"forces of a structure held out: error {error:.3f} eV/A, of the mean force {mean:.3f}")
        print(
            f"{md} steps of dynamics: drift {1000 * drift:.3f} meV by atom, forces then off by {after:.3f} eV/A"
        )
    return {"first": losses[0], "last": losses[-1], "error": error, "mean": mean, "drift": drift}


def parsed() -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of local ranks, without torchrun")
    parser.add_argument(
        "--backend", default=None, help="shm, gloo or threads; default: the fastest available"
    )
    parser.add_argument("--side", type=int, default=5, help="atoms along each side of the slab")
    parser.add_argument("--structures", type=int, default=6, help="displaced slabs to train on")
    parser.add_argument("--steps", type=int, default=40, help="steps of training")
    parser.add_argument("--md", type=int, default=20, help="steps of molecular dynamics")
    asked = parser.parse_args()
    if min(asked.side, asked.structures, asked.steps, asked.md) < 1:
        parser.error("--side, --structures, --steps and --md are at least 1")
    return asked


if __name__ == "__main__":
    asked = parsed()
    sizes = (asked.side, asked.structures, asked.steps, asked.md)
    if "WORLD_SIZE" in os.environ:
        gm.init(asked.backend)
        main(*sizes)
    else:
        gm.launch(main, asked.ranks, backend=asked.backend, args=sizes)
