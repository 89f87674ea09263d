"""Drop-in replacements for other libraries' collectives, with correct gradients.

Change the import and leave the calls unchanged; docs/migration.md shows before and after for each.

====================  =============================================================================
module                replaces
====================  =============================================================================
`fairchem`            `fairchem.core.common.gp_utils` of fairchem-core 2.11 and later
`gp_utils`            `ocpmodels.common.gp_utils`, and that of fairchem-core before 2.11
`ksuit`               `AllGatherGradAutograd` of `ksuit.distributed.functional`
`megatron`            `megatron.core.tensor_parallel.mappings`
`torch_nn`            `torch.distributed.nn.functional`
`towhee`              `AllGather` of `towhee.models.drl.until_module`
====================  =============================================================================

Each name is a thin wrapper of a gradmesh verb: higher derivatives, forward mode and `torch.func` work, and uneven sizes
are correct wherever the original accepts them.
"""

from gradmesh.compat import fairchem, gp_utils, ksuit, megatron, torch_nn, towhee

__all__ = ["fairchem", "gp_utils", "ksuit", "megatron", "torch_nn", "towhee"]
