"""Sharded checkpoints by `torch.distributed.checkpoint`, which any number of ranks can load."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradmesh.errors import ArgumentError
from gradmesh.nn.tensor import Cut, Parallel, entries
from gradmesh.runtime.mesh import Axis

__all__ = ["load_sharded_state_dict", "sharded_state_dict"]

_PLANNING = threading.Lock()
"""torch's plan for a checkpoint with further names sets a global, which changes the names on ranks that are threads."""


class _Shard(Tensor):
    """A dense tensor of which this rank has a block: a meta tensor of the dense shape. DTensor has no uneven sizes."""

    block: Tensor
    """This rank's block, which shares memory with the parameter."""
    offsets: torch.Size
    """Where the block begins in the dense tensor."""

    @staticmethod
    def of(block: Tensor, cut: Cut, axis: Axis) -> _Shard:
        """This rank's shard; the block is a DTensor with `fully_shard` over another axis."""
        shape, offsets = list(block.shape), [0] * block.dim()
        if hasattr(block, "to_local"):
            (chunk,) = block.__create_chunk_list__()  # type: ignore[attr-defined]
            block, offsets = block.to_local(), list(chunk.offsets)
        shape[cut.dim] = sum(cut.sizes)
        offsets[cut.dim] += sum(cut.sizes[: axis.rank])
        made = torch.empty(shape, dtype=block.dtype, device="meta").as_subclass(_Shard)
        made.block, made.offsets = block.detach(), torch.Size(offsets)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The block's device."""
        return self.block.device if hasattr(self, "block") else torch.device("meta")

    def new_empty(self, *_: Any, **__: Any) -> Tensor:
        """A shard that has no block yet, for a copy of this one in asynchronous saving."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").as_subclass(_Shard)

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        # An empty block has the offsets of the next one, which would be dropped as a duplicate.
        empty = self.numel() and not self.block.numel()
        return [] if empty else [ChunkStorageMetadata(self.offsets, self.block.shape)]

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint import metadata, planner

        index = metadata.MetadataIndex(name, self.offsets)
        form = metadata.TensorProperties.create_from_tensor(self.block)
        data = [planner.TensorWriteData(chunk, form, self.shape) for chunk in self.__create_chunk_list__()]
        return [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=each) for each in data]

    def __get_tensor_shard__(self, _: object) -> Tensor:
        return self.block


class _Through(dict[str, Any]):
    """Values of an optimizer's dict; those that a checkpoint sets are set there too. Tensors are loaded in place."""

    def __init__(self, target: dict[str, Any], values: dict[str, Any]) -> None:
        super().__init__(values)
        self.target = target

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, value)
        if not isinstance(value, Tensor):
            self.target[key] = value

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)  # a copy, for asynchronous saving, is without the optimizer


def sharded_state_dict(module: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """The state of a module, or of its optimizer, for `torch.distributed.checkpoint`; any number of ranks can load it.

    ::

        V    a sharded parameter has the dense shape, and each rank saves and loads its block

    Names and shapes are those of `dense_state_dict`; each rank has its own experts. Loading works in place, on the
    parameters and on the optimizer with the options of its groups. Sends nothing.

    Args:
        module: as in `dense_state_dict`; layers may also be in `fully_shard` over another axis of the mesh.
        optimizer: if given, return its state instead, keyed by the module's names. State of the shape of a sharded
            parameter is sharded with it. Before the first step the state is created, by a step that changes nothing.

    Raises:
        ArgumentError: an axis has another number of ranks than when a layer was constructed; a parameter of the
            optimizer is not the module's, or the state of a sharded one has another shape, as that of Adafactor.

    Example:
        >>> def on_each_rank():
        ...     state = gm.nn.sharded_state_dict(gm.nn.ColumnParallelLinear(2, 5, bias=False))
        ...     return tuple(state["weight"].shape)
        >>> gm.launch(on_each_rank, 2, backend="threads")
        [(5, 2), (5, 2)]
    """
    held = module.state_dict(keep_vars=optimizer is not None)
    if optimizer is None:
        return {dense: _sharded(held[name], owner, last) for name, dense, owner, last in entries(module)}
    places = dict[int, tuple[str, Parallel | None, str]]()
    for name, dense, owner, last in entries(module):
        places.setdefault(id(held[name]), (dense, owner, last))
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    if unknown := [list(each.shape) for each in trained if id(each) not in places]:
        raise ArgumentError.of(
            "the optimizer has a parameter that is not in the module",
            op="nn.sharded_state_dict",
            expected="an optimizer of parameters of the module",
            got=f"{len(unknown)} other parameters, of shapes {unknown[:4]}",
            remedy="pass the module that has all of them",
        )
    if not optimizer.state:
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        get_optimizer_state_dict(module, optimizer)  # creates it
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found["param_groups"].append(_Through(group, options))
        for parameter in group["params"]:
            (dense, owner, last), state = places[id(parameter)], optimizer.state.get(parameter, {})
            values = {
                key: _sharded(value, owner, last, parameter) if isinstance(value, Tensor) else value
                for key, value in state.items()
            }
            found["state"][dense] = _Through(state, values)
    return found


def _sharded(value: Any, owner: Parallel | None, name: str, parameter: Tensor | None = None) -> Any:
    """A value of a state dict, or of a parameter's state, as a shard if the parameter is sharded."""
    if owner is None or name not in owner.cuts or not value.dim():
        return value
    if parameter is not None and value.shape != parameter.shape:
        raise ArgumentError.of(
            f"the optimizer's state of {name!r} cannot be sharded as the parameter is",
            op="nn.sharded_state_dict",
            axis=str(owner.axis),
            expected=f"tensors of shape {list(parameter.shape)} or ()",
            got=f"a tensor of shape {list(value.shape)}",
            remedy="use an optimizer whose state has the shapes of the parameters, such as torch.optim.AdamW",
        )
    return _Shard.of(value, owner.cuts[name], owner.axis)


def load_sharded_state_dict(
    state: dict[str, Any], checkpoint_id: str | os.PathLike[str] | None = None, **options: Any
) -> None:
    """Load a checkpoint into the state of `sharded_state_dict`, in place, if it fits. A collective.

    `torch.distributed.checkpoint.load` also loads it. That ignores tensors of the checkpoint that the state does not
    have, such as further experts, and raises errors that are not Exceptions.

    Args:
        state: the dict that was saved, of this model; keys of the outer dict may be left out.
        checkpoint_id: as in `torch.distributed.checkpoint.load`.
        options: other arguments of it, such as `storage_reader`.

    Raises:
        ArgumentError: on every rank: the checkpoint lacks a name of the state, has another shape, or has a tensor that
            no rank loads (nothing is loaded then); or it cannot be read.

    Example:
        >>> import tempfile
        >>> from torch.distributed import checkpoint
        >>> def on_each_rank(load):
        ...     layer = gm.nn.ColumnParallelLinear(2, 5)
        ...     state = {"model": gm.nn.sharded_state_dict(layer)}
        ...     if load:
        ...         gm.nn.load_sharded_state_dict(state, folder)
        ...     else:
        ...         torch.nn.init.constant_(layer.weight, 1.0 + gm.rank())
        ...         checkpoint.save(state, checkpoint_id=folder)
        ...     return layer.weight[:, 0].tolist()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for ranks, load in ((2, False), (3, True)):
        ...         print(gm.launch(on_each_rank, ranks, backend="threads", args=(load,)))
        [[1.0, 1.0, 1.0], [2.0, 2.0]]
        [[1.0, 1.0], [1.0, 2.0], [2.0]]
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    unsaved = list[_Through]()

    class Strict(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            saved = metadata.state_dict_metadata
            for top, value in state_dict.items():
                if not isinstance(value, Mapping) or "param_groups" not in value:
                    continue
                # A parameter that had no gradient yet when the checkpoint was saved has no state in it.
                for name, each in list(value["state"].items()):
                    if not any(f"{top}.state.{name}.{key}" in saved for key in each):
                        unsaved.append(value["state"].pop(name))
                # Options that are new in this torch keep their values.
                for number, group in enumerate(value["param_groups"]):
                    lacking = [key for key in group if f"{top}.param_groups.{number}.{key}" not in saved]
                    for key in lacking if len(lacking) < len(group) else ():
                        del group[key]
            with _PLANNING:
                super().set_up_planner(state_dict, metadata, is_coordinator)

        def create_local_plan(self) -> Any:
            with _PLANNING:
                return super().create_local_plan()

        def create_global_plan(self, global_plan: list[Any]) -> list[Any]:
            loaded = {item.dest_index.fqn for plan in global_plan for item in plan.items}
            within = tuple(f"{key}." for key, value in state.items() if isinstance(value, Mapping)) or ""
            left = [
                name
                for name, form in self.metadata.state_dict_metadata.items()  # type: ignore[union-attr]
                if isinstance(form, TensorStorageMetadata) and form.size.numel()
                if name.startswith(within) and name not in loaded
            ]
            if left:
                raise ValueError(
                    f"{len(left)} tensors of the checkpoint are not in the state: " + ", ".join(left[:4])
                )
            return super().create_global_plan(global_plan)

    try:
        load(state, checkpoint_id=checkpoint_id, planner=Strict(), **options)
    except CheckpointException as error:
        causes = {str(cause) or repr(cause): rank for rank, (cause, _) in reversed(error.failures.items())}
        raise ArgumentError.of(
            "the checkpoint could not be loaded",
            op="nn.load_sharded_state_dict",
            expected="the names and dense shapes of the state",
            got="\n".join(f"rank {rank}: {text}" for text, rank in [*causes.items()][:4]),
            remedy="construct the model and the optimizer as when they were saved; the number of ranks may differ",
        ) from error
    for each in unsaved:
        each.target.clear()
