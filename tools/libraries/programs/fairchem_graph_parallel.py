"""fairchem's graph-parallel training, as its training unit does it: a tiny eSCN-MD, energies and forces."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from ase import Atoms
from fairchem.core.common import distutils, gp_utils
from fairchem.core.datasets.atomic_data import AtomicData, atomicdata_list_to_batch
from fairchem.core.models.base import HydraModelV2
from fairchem.core.models.uma.escn_md import MLP_EFS_Head, eSCNMDBackbone
from fairchem.core.modules.loss import DDPMTLoss, L2NormLoss, PerAtomMAELoss
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

DATASET = "omat"


def molecule(atoms: int, draws: torch.Generator) -> AtomicData:
    """Random atoms in a box."""
    positions = 4 * torch.rand(atoms, 3, generator=draws)
    numbers = torch.randint(1, 9, (atoms,), generator=draws)
    made = AtomicData.from_ase(Atoms(numbers.numpy(), positions.numpy()), r_edges=False, task_name=DATASET)
    made.energy = torch.randn(1, generator=draws)
    made.forces = torch.randn(atoms, 3, generator=draws)
    return made


def main() -> None:
    """Train for two steps on batches of two systems, which all ranks share."""
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    distutils.assign_device_for_local_rank(True, 0)
    gp_utils.setup_graph_parallel_groups(world, "gloo")
    gp_utils.set_gp_config(gp_utils.GraphParallelConfig(world, gp_utils.GPMode(sys.argv[1])))
    torch.manual_seed(0)
    backbone = eSCNMDBackbone(
        max_num_elements=10,
        sphere_channels=8,
        lmax=2,
        mmax=1,
        otf_graph=True,
        max_neighbors=50,
        cutoff=3.0,
        edge_channels=8,
        num_distance_basis=16,
        direct_forces=False,
        regress_forces=True,
        num_layers=2,
        hidden_channels=8,
        use_pbc=False,
        always_use_pbc=False,
        dataset_mapping={DATASET: DATASET},
        use_dataset_embedding=True,
    )
    model = DistributedDataParallel(HydraModelV2(backbone, {"efs": MLP_EFS_Head(backbone)}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    of_energy, of_forces = DDPMTLoss(PerAtomMAELoss()), DDPMTLoss(L2NormLoss(), coefficient=10.0)
    draws = torch.Generator().manual_seed(1)
    for _ in range(2):
        batch = atomicdata_list_to_batch([molecule(atoms, draws) for atoms in (9, 6)])
        made = model(batch)["efs"]
        energy, forces = made["energy"]["energy"], made["forces"]["forces"]
        loss = of_energy(energy, batch.energy, every(energy), batch.natoms)
        loss = loss + of_forces(forces, batch.forces, every(forces)[:, 0], batch.natoms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def every(x: Tensor) -> Tensor:
    """A mask of all entries."""
    return torch.ones_like(x, dtype=torch.bool)


if __name__ == "__main__":
    main()
