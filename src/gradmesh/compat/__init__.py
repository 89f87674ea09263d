"""Drop-ins: the names that code already uses, with right gradients.

Change the import and leave the calls as they are; docs/migration.md shows before and after for each.

====================  =============================================================================
module                takes the place of
====================  =============================================================================
`fairchem`            `fairchem.core.common.gp_utils` of fairchem-core 2.11 and later
`gp_utils`            `ocpmodels.common.gp_utils`, and that of fairchem-core before 2.11
`ksuit`               `AllGatherGradAutograd` of `ksuit.distributed.functional`
`megatron`            `megatron.core.tensor_parallel.mappings`
`torch_nn`            `torch.distributed.nn.functional`
`towhee`              `AllGather` of `towhee.models.drl.until_module`
====================  =============================================================================

Each name is a thin one over a verb of gradmesh, so that every order of derivative, forward mode and `torch.func`
work through it, uneven sizes are right where the original takes them, and a rank is always one of the axis.
"""

from gradmesh.compat import fairchem, gp_utils, ksuit, megatron, torch_nn, towhee

__all__ = ["fairchem", "gp_utils", "ksuit", "megatron", "torch_nn", "towhee"]
