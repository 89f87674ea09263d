"""Libraries that train large models: tensor, sequence and expert parallel regions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from tools.replaced.cases import (
    Case,
    Dense,
    Shape,
    World,
    all_rows,
    gathered,
    kept,
    rows,
    sent,
    sent_rows,
    sliced,
    sum_sliced,
    summed,
    transposed,
)
from tools.replaced.own_tests import Tests
from tools.replaced.repository import Repository, alone, imported
from tools.replaced.sources import Replaced, Source


def _copy(name: str, call: Any) -> Case:
    return Case(name, call, kept, all_rows(0, 6), same=True, uneven=None)


def _reduce(name: str, call: Any) -> Case:
    return Case(name, call, summed, all_rows(0, 6), once=True, uneven=None)


def _megatron_load(root: Path) -> Any:
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]  # it asks
    return imported("megatron.core.tensor_parallel.mappings")(root)


def _last(*, shape: Shape, dense: Dense, name: str, same: bool = False, once: bool = False) -> Case:
    """A mapping that takes a group and no sizes; one that splits is tried with seven rows."""
    uneven = (3, 2, 2) if "scatter" in name else (3, 1, 2)
    return Case(name, lambda m, x, w: getattr(m, name)(x, w.group), dense, shape, same, once, uneven=uneven)


MEGATRON = Repository(
    "megatron-core",
    Source(
        "NVIDIA/Megatron-LM",
        "55ac7082517c3878ae653c07c09c534b8aed49f6",
        "megatron-core==0.16.1",
        parts=("megatron",),
    ),
    (Replaced("megatron/core/tensor_parallel/mappings.py", "megatron.py"),),
    _megatron_load,
    (
        _copy(
            "copy_to_tensor_model_parallel_region",
            lambda m, x, w: m.copy_to_tensor_model_parallel_region(x, w.group),
        ),
        _reduce(
            "reduce_from_tensor_model_parallel_region",
            lambda m, x, w: m.reduce_from_tensor_model_parallel_region(x, w.group),
        ),
        _last(
            name="scatter_to_tensor_model_parallel_region",
            dense=sliced(1),
            shape=all_rows(3, 0, dim=1),
            same=True,
        ),
        _last(
            name="gather_from_tensor_model_parallel_region",
            dense=gathered(1),
            shape=rows(3, 0, dim=1),
            once=True,
        ),
        _last(
            name="all_gather_last_dim_from_tensor_parallel_region",
            dense=gathered(1),
            shape=rows(3, 0, dim=1),
        ),
        _last(
            name="reduce_scatter_last_dim_to_tensor_parallel_region",
            dense=sum_sliced(1),
            shape=all_rows(3, 0, dim=1),
        ),
        _last(
            name="scatter_to_sequence_parallel_region",
            dense=sliced(),
            shape=all_rows(0, 3),
            same=True,
        ),
        Case(
            "gather_from_sequence_parallel_region",
            lambda m, x, w: m.gather_from_sequence_parallel_region(
                x, group=w.group, output_split_sizes=None if len(set(w.sizes)) == 1 else list(w.sizes)
            ),
            gathered(),
            rows(0, 3),
        ),
        Case(
            "gather_from_sequence_parallel_region, tensor_parallel_output_grad=False",
            lambda m, x, w: m.gather_from_sequence_parallel_region(
                x, False, w.group, None if len(set(w.sizes)) == 1 else list(w.sizes)
            ),
            gathered(),
            rows(0, 3),
            once=True,
        ),
        Case(
            "reduce_scatter_to_sequence_parallel_region",
            lambda m, x, w: m.reduce_scatter_to_sequence_parallel_region(
                x, w.group, None if len(set(w.sizes)) == 1 else list(w.sizes)
            ),
            sum_sliced(),
            all_rows(0, 3),
        ),
        Case(
            "all_to_all",
            lambda m, x, w: m.all_to_all(w.group, x, w.receives(w.rank), w.sends(w.rank)),
            sent,
            sent_rows(0, 3),
        ),
        Case(
            "all_to_all_sp2hp",
            lambda m, x, w: m.all_to_all_sp2hp(x, w.group),
            transposed(1, 0),
            rows(0, 6),
            uneven=None,
        ),
        Case(
            "all_to_all_hp2sp",
            lambda m, x, w: m.all_to_all_hp2sp(x, w.group),
            transposed(0, 1),
            lambda w, rank: (6, 6 // w.size),
            uneven=None,
        ),
    ),
    Tests(
        (
            "tests/__init__.py",
            "tests/unit_tests/__init__.py",
            "tests/unit_tests/test_utilities.py",
            "tests/unit_tests/tensor_parallel/__init__.py",
            "tests/unit_tests/tensor_parallel/test_mappings.py",
        ),
        ("tests/unit_tests/tensor_parallel/test_mappings.py",),
        ranks=8,
        standins=("cuda",),
    ),
    left="`torch.cuda.current_device` is the CPU here. Helpers such as `_gather_along_last_dim` go, which no other "
    "file and no test uses. Its tests ask for eight GPUs: each is the CPU, with Gloo for NCCL, before and "
    "after.",
)


def _deepspeed_load(root: Path) -> Any:
    import importlib

    files = {
        name: importlib.import_module(f"deepspeed.{name}")
        for name in (
            "moe.mappings",
            "moe.sharded_moe",
            "moe.ep_tp_dispatch",
            "sequence.cross_entropy",
            "sequence.layer",
        )
    }
    assert all(Path(str(each.__file__)).is_relative_to(root) for each in files.values())
    backend = importlib.import_module("deepspeed.comm.torch")
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]  # it is compiled on each rank
    return SimpleNamespace(**{name.split(".")[1]: each for name, each in files.items()})


def _deepspeed_prepare(module: Any, world: World | None) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend=dist.get_backend(), verbose=False)
    if world is not None:
        deepspeed.utils.groups.mpu = SimpleNamespace(
            get_tensor_model_parallel_world_size=lambda: world.size,
            get_tensor_model_parallel_rank=lambda: world.rank,
            get_tensor_model_parallel_group=lambda: world.group,
        )


def _targets(classes: int) -> Tensor:
    return torch.tensor([0, 3, 5]) % classes


DEEPSPEED = Repository(
    "deepspeed",
    Source(
        "deepspeedai/DeepSpeed",
        "edaa7221267243c7be7fb49c5d5f5c4fb97b4641",
        "deepspeed==0.19.8",
        parts=("deepspeed",),
    ),
    (
        Replaced(
            "deepspeed/moe/mappings.py",
            "deepspeed_mappings.py",
            (
                "_gather_tokens",
                "_drop_tokens",
                "_GatherTokens",
                "_DropTokens",
                "gather_tokens",
                "drop_tokens",
            ),
        ),
        Replaced("deepspeed/moe/sharded_moe.py", "deepspeed_moe.py", ("_AllToAll",)),
        Replaced("deepspeed/moe/ep_tp_dispatch.py", "deepspeed_rows.py", ("_AllGatherVariableRows",)),
        Replaced(
            "deepspeed/sequence/cross_entropy.py",
            "deepspeed_loss.py",
            ("_VocabParallelCrossEntropy", "_GatherSequenceLoss"),
        ),
        Replaced("deepspeed/sequence/layer.py", "deepspeed_sequence.py", ("_SeqAllToAll",)),
    ),
    _deepspeed_load,
    (
        Case("gather_tokens", lambda m, x, w: m.mappings.gather_tokens(x), gathered(), rows(0, 3), once=True),
        Case(
            "drop_tokens",
            lambda m, x, w: m.mappings.drop_tokens(x),
            sliced(),
            all_rows(0, 3),
            same=True,
            uneven=(3, 2, 2),
        ),
        Case(
            "sharded_moe._AllToAll",
            lambda m, x, w: m.sharded_moe._AllToAll.apply(w.group, x),
            lambda xs, w: _exchanged(xs, w),
            all_rows(0, 3),
            uneven=None,
        ),
        Case(
            "ep_tp_dispatch._AllGatherVariableRows",
            lambda m, x, w: m.ep_tp_dispatch._AllGatherVariableRows.apply(x, w.group, w.sizes, max(w.sizes)),
            gathered(),
            rows(0, 3),
        ),
        Case(
            "cross_entropy._GatherSequenceLoss",
            lambda m, x, w: m.cross_entropy._GatherSequenceLoss.apply(x, w.group, False),
            gathered(),
            rows(0, 3),
            once=True,
        ),
        Case(
            "cross_entropy._VocabParallelCrossEntropy",
            lambda m, x, w: m.cross_entropy._VocabParallelCrossEntropy.apply(
                x, _targets(sum(w.sizes)), w.group, sum(w.sizes[: w.rank]), sum(w.sizes[: w.rank + 1]), -100
            ),
            lambda xs, w: (
                [cross_entropy(torch.cat(list(xs), 1), _targets(sum(w.sizes)), reduction="none")] * w.size
            ),
            rows(3, 0, dim=1),
            once=True,
        ),
        Case(
            "sequence._SeqAllToAll, to heads",
            lambda m, x, w: m.layer._SeqAllToAll.apply(w.group, x, 2, 1, 0),
            transposed(2, 1),
            rows(2, 0, 6, 3, dim=1),
        ),
        Case(
            "sequence._SeqAllToAll, to sequences",
            lambda m, x, w: m.layer._SeqAllToAll.apply(w.group, x, 1, 2, 0),
            transposed(1, 2),
            lambda w, rank: (2, 6, 6 // w.size, 3),
            uneven=None,
        ),
    ),
    Tests(
        ("tests/conftest.py", "tests/unit"),
        (
            "unit/v1/moe/test_autoep_autotp_dispatch.py",
            "unit/sequence_parallelism/test_ulysses.py",
            "-k",
            "dispatch or (TestUlyssesAll2All and not odd and 16-4-4)",
        ),
        inside="tests",
        variables=(("DS_ACCELERATOR", "cpu"),),
    ),
    _deepspeed_prepare,
    left="the overlap of `_SeqAllToAll` with other work on a stream, and heads that the ranks do not divide. Of its "
    "tests, those of the dispatch were run; the two of Ulysses are skipped, since they ask for four devices.",
)


def _exchanged(xs: Any, world: World) -> list[Tensor]:
    """Equal parts of the rows, exchanged."""
    parts = [x.tensor_split(world.size) for x in xs]
    return [torch.cat([parts[source][rank] for source in range(world.size)]) for rank in range(world.size)]


NANOTRON = Repository(
    "nanotron",
    Source(
        "huggingface/nanotron",
        "2411b022a75fb7f7561a1bb4166706da5e1b76de",
        inside="src",
        parts=("src/nanotron",),
    ),
    (Replaced("nanotron/parallel/tensor_parallel/distributed_differentiable_primitives.py", "nanotron.py"),),
    lambda root: alone(
        root,
        "nanotron/parallel/tensor_parallel/distributed_differentiable_primitives.py",
        "nanotron.parallel.tensor_parallel.distributed_differentiable_primitives",
        **{"nanotron": {"distributed": dist}, "nanotron.distributed": dist},
    ),
    (
        _copy("differentiable_identity", lambda m, x, w: m.differentiable_identity(x, w.group)),
        _reduce("differentiable_all_reduce_sum", lambda m, x, w: m.differentiable_all_reduce_sum(x, w.group)),
        Case(
            "differentiable_all_gather",
            lambda m, x, w: m.differentiable_all_gather(x, w.group),
            gathered(),
            rows(0, 3),
        ),
        Case(
            "differentiable_reduce_scatter_sum",
            lambda m, x, w: m.differentiable_reduce_scatter_sum(x, w.group),
            sum_sliced(),
            all_rows(0, 3),
            uneven=(3, 2, 2),
        ),
    ),
    Tests(
        ("tests/test_tensor_parallel.py", "tests/helpers"),
        ("tests/test_tensor_parallel.py", "-k", "2-1-1 and (embedding or row and False-False)"),
        standins=("cuda",),
        variables=(("STANDIN_GPUS", "2"),),
    ),
    left="of its tests, those of embeddings and of row parallel layers on two ranks were run; those of embeddings fail "
    "before and after, since Gloo averages no integers.",
)

XFORMERS = Repository(
    "xformers",
    Source("facebookresearch/xformers", "ca6d2aa0d43241fc8a8dcd872debc2406160160d", parts=("xformers/ops",)),
    (
        Replaced(
            "xformers/ops/differentiable_collectives.py",
            "xformers.py",
            (
                "_CopyToModelParallelRegion",
                "copy_to_model_parallel_region",
                "_ReduceFromModelParallelRegion",
                "reduce_from_model_parallel_region",
                "_GatherFromSequenceParallelRegion",
                "gather_from_sequence_parallel_region",
                "_ScatterToSequenceParallelRegion",
                "scatter_to_sequence_parallel_region",
            ),
        ),
    ),
    lambda root: alone(
        root, "xformers/ops/differentiable_collectives.py", "xformers.ops.differentiable_collectives"
    ),
    (
        _copy("copy_to_model_parallel_region", lambda m, x, w: m.copy_to_model_parallel_region(x, w.group)),
        _reduce(
            "reduce_from_model_parallel_region",
            lambda m, x, w: m.reduce_from_model_parallel_region(x, w.group),
        ),
        Case(
            "gather_from_sequence_parallel_region",
            lambda m, x, w: m.gather_from_sequence_parallel_region(x, w.group),
            gathered(),
            rows(0, 3),
        ),
        Case(
            "scatter_to_sequence_parallel_region",
            lambda m, x, w: m.scatter_to_sequence_parallel_region(x, w.group),
            sum_sliced(),
            all_rows(0, 3),
            uneven=(3, 2, 2),
        ),
    ),
    left="the functions without gradients, which its sequence parallel layers use. Its tests call these "
    "alone: not run.",
)

VERL = Repository(
    "verl",
    Source("volcengine/verl", "b178a3cd56f58b2d502255daba591e92833930a7", parts=("verl/utils/ulysses.py",)),
    (
        Replaced(
            "verl/utils/ulysses.py",
            "verl.py",
            ("all_to_all_tensor", "all_gather_tensor", "SeqAllToAll", "Gather"),
        ),
    ),
    lambda root: alone(root, "verl/utils/ulysses.py", "verl.utils.ulysses"),
    (
        Case(
            "gather_seq_scatter_heads",
            lambda m, x, w: m.gather_seq_scatter_heads(x, 0, 1, group=w.group),
            transposed(1, 0),
            rows(0, 6, 2),
        ),
        Case(
            "gather_heads_scatter_seq",
            lambda m, x, w: m.gather_heads_scatter_seq(x, 1, 0, group=w.group),
            transposed(0, 1),
            lambda w, rank: (6, 6 // w.size, 2),
            uneven=None,
        ),
        Case(
            "gather_outputs_and_unpad",
            lambda m, x, w: m.gather_outputs_and_unpad(x, 0, group=w.group),
            gathered(),
            rows(0, 3),
            once=True,
            factor=float,
        ),
        Case(
            "gather_outputs_and_unpad, grad_scaler=False",
            lambda m, x, w: m.gather_outputs_and_unpad(x, 0, grad_scaler=False, group=w.group),
            gathered(),
            rows(0, 3),
            once=True,
        ),
    ),
    left="`vocab_parallel_entropy`, which needs megatron's groups on GPUs. Its test of Ulysses needs "
    "flash-attn and GPUs: not run.",
)


def _veomni_load(root: Path) -> Any:
    place = "veomni.distributed.sequence_parallel"
    given: dict[str, Any] = {
        "veomni.utils.device": {"get_device_id": lambda: "cpu"},
        f"{place}.comm": {
            "get_ulysses_sequence_parallel_group": lambda: None,
            "get_ulysses_sequence_parallel_world_size": lambda group: dist.get_world_size(group),
        },
        f"{place}.utils": {"pad_tensor": None, "unpad_tensor": None},
    }
    sequence = alone(root, f"{place.replace('.', '/')}/ulysses.py", f"{place}.ulysses", **given)
    moe = alone(root, "veomni/distributed/moe/comm.py", "veomni.distributed.moe.comm")
    return SimpleNamespace(ulysses=sequence, moe=moe)


def _rolled(by: int) -> Dense:
    return lambda xs, world: list(torch.cat(list(xs)).roll(by, 0).split(list(world.sizes)))


VEOMNI = Repository(
    "VeOmni",
    Source(
        "ByteDance-Seed/VeOmni", "d9774494f5d8042321386c65c9406e732a271501", parts=("veomni/distributed",)
    ),
    (
        Replaced(
            "veomni/distributed/sequence_parallel/ulysses.py",
            "veomni_ulysses.py",
            ("_all_gather_into_tensor", "_SeqAllToAll", "_Slice", "_Gather", "_AlltoAllRegion", "_Roll"),
        ),
        Replaced("veomni/distributed/moe/comm.py", "veomni_moe.py", ("_AllToAll",)),
    ),
    _veomni_load,
    (
        Case(
            "gather_seq_scatter_heads",
            lambda m, x, w: m.ulysses.gather_seq_scatter_heads(x, 0, 1, group=w.group),
            transposed(1, 0),
            rows(0, 6, 2),
        ),
        Case(
            "gather_heads_scatter_seq, dimensions 1 and 2",
            lambda m, x, w: m.ulysses.gather_heads_scatter_seq(x, 2, 1, group=w.group),
            transposed(1, 2),
            lambda w, rank: (2, 6, 6 // w.size),
            uneven=None,
        ),
        Case(
            "_Slice",
            lambda m, x, w: m.ulysses._Slice.apply(w.group, x, 0, False),
            sliced(),
            all_rows(0, 3),
            same=True,
            uneven=(3, 2, 2),
        ),
        Case(
            "_Slice, scale_grad",
            lambda m, x, w: m.ulysses._Slice.apply(w.group, x, 0, True),
            sliced(),
            all_rows(0, 3),
            same=True,
            factor=lambda ranks: 1 / ranks,
            uneven=(3, 2, 2),
        ),
        Case(
            "_Gather", lambda m, x, w: m.ulysses._Gather.apply(w.group, x, 0, False), gathered(), rows(0, 3)
        ),
        Case(
            "_AlltoAllRegion",
            lambda m, x, w: m.ulysses._AlltoAllRegion.apply(w.group, x, w.sends(w.rank), w.receives(w.rank)),
            sent,
            sent_rows(0, 3),
        ),
        Case(
            "roll_with_sequence_parallel, 1",
            lambda m, x, w: m.ulysses.roll_with_sequence_parallel(x, 1, 0, w.group),
            _rolled(1),
            rows(0, 3),
        ),
        Case(
            "roll_with_sequence_parallel, -1",
            lambda m, x, w: m.ulysses.roll_with_sequence_parallel(x, -1, 0, w.group),
            _rolled(-1),
            rows(0, 3),
        ),
        Case(
            "moe.all_to_all",
            lambda m, x, w: m.moe.all_to_all(w.group, x, w.receives(w.rank), w.sends(w.rank)),
            sent,
            sent_rows(0, 3),
        ),
    ),
    left="`all_to_all_async`, whose result is used before it is complete, and `ReduceLoss`. Groups and paddings are "
    "left out where the two files are imported. Its tests of Ulysses need GPUs: not run.",
)

_FAST = "fastvideo/distributed/device_communicators/base_device_communicator.py"
FASTVIDEO = Repository(
    "FastVideo",
    Source("hao-ai-lab/FastVideo", "2f3d4074064e4d86f99dc784ebbaa296e6f5925f", parts=(_FAST,)),
    (Replaced(_FAST, "fastvideo.py", ("DistributedAutograd",)),),
    lambda root: alone(root, _FAST, "fastvideo.base_device_communicator"),
    (
        Case(
            "AllReduce",
            lambda m, x, w: m.DistributedAutograd.AllReduce.apply(w.group, x, dist.ReduceOp.SUM),
            summed,
            all_rows(0, 3),
            uneven=None,
        ),
        Case(
            "AllReduce, MAX",
            lambda m, x, w: m.DistributedAutograd.AllReduce.apply(w.group, x, dist.ReduceOp.MAX),
            lambda xs, w: [torch.stack(list(xs)).amax(0)] * w.size,
            all_rows(0, 3),
            uneven=None,
        ),
        Case(
            "AllGather",
            lambda m, x, w: m.DistributedAutograd.AllGather.apply(w.group, x, w.size, 1),
            gathered(1),
            rows(3, 0, dim=1),
        ),
        Case(
            "Slice",
            lambda m, x, w: m.DistributedAutograd.Slice.apply(w.group, x, w.size, 1, False),
            sliced(1),
            all_rows(3, 0, dim=1),
            same=True,
            uneven=(3, 2, 2),
        ),
        Case(
            "AllToAll4D, to heads",
            lambda m, x, w: m.DistributedAutograd.AllToAll4D.apply(w.group, x, w.size, 2, 1),
            transposed(2, 1),
            rows(2, 0, 6, 3, dim=1),
        ),
        Case(
            "AllToAll4D, to sequences",
            lambda m, x, w: m.DistributedAutograd.AllToAll4D.apply(w.group, x, w.size, 1, 2),
            transposed(1, 2),
            lambda w, rank: (2, 6, 6 // w.size, 3),
            uneven=None,
        ),
    ),
    left="its tests of sequence parallel models need their weights and GPUs: not run.",
)

MEGABLOCKS = Repository(
    "megablocks",
    Source(
        "databricks/megablocks",
        "78eea65fda01e638af36ae38853bc51efb04a4b4",
        parts=("megablocks/layers/all_to_all.py",),
    ),
    (Replaced("megablocks/layers/all_to_all.py", "megablocks.py"),),
    lambda root: alone(root, "megablocks/layers/all_to_all.py", "megablocks.layers.all_to_all"),
    (
        Case(
            "all_to_all",
            lambda m, x, w: m.all_to_all(x, w.receives(w.rank), w.sends(w.rank), w.group)[0],
            sent,
            sent_rows(0, 3),
        ),
    ),
    left="`async_op=True` runs to the end at once; `gm.all_to_all(..., async_op=True)` has its result from `wait()`. "
    "None of its tests calls it, and they need kernels on GPUs: not run.",
)


def _vocabulary(xs: Any, world: World) -> list[Tensor]:
    whole = torch.cat(list(xs), 1)
    return [cross_entropy(whole, _targets(sum(world.sizes)), reduction="sum")] * world.size


TORCHTITAN = Repository(
    "torchtitan",
    Source(
        "pytorch/torchtitan",
        "5ab3a0fd10a1d7ac04734077e7ec1df12a82c947",
        "torchtitan==0.3.0",
        parts=("torchtitan",),
    ),
    (Replaced("torchtitan/components/loss.py", "torchtitan.py", ("_LossParallelCrossEntropy",)),),
    imported("torchtitan.components.loss"),
    (
        Case(
            "_LossParallelCrossEntropy",
            lambda m, x, w: m._LossParallelCrossEntropy.apply(
                x, _targets(sum(w.sizes)), w.group, sum(w.sizes)
            ),
            _vocabulary,
            rows(3, 0, dim=1),
            once=True,
            uneven=(3, 3, 1),
        ),
    ),
    Tests(
        ("tests/unit_tests/test_loss.py",),
        ("tests/unit_tests/test_loss.py",),
        packages=("expecttest",),
    ),
    left="its `test_loss_parallel_cross_entropy_parity` fails after: it compares bit for bit with torch's "
    "`loss_parallel`, from which the gradient of `gm.nn.vocab_parallel_cross_entropy` differs by rounding. Losses are "
    "in single precision, as before.",
)

_FAIR = "fairscale/nn/model_parallel"


def _fairscale_load(root: Path) -> Any:
    names = ("mappings", "cross_entropy", "initialize")
    files = {name: imported(f"fairscale.nn.model_parallel.{name}")(root) for name in names}
    moe = imported("fairscale.nn.moe.moe_layer")(root)
    return SimpleNamespace(**vars(files["mappings"]), **files, moe_layer=moe)


def _fairscale_prepare(module: Any, world: World | None) -> None:
    if world is not None:
        module.initialize._MODEL_PARALLEL_GROUP = world.group


FAIRSCALE = Repository(
    "fairscale",
    Source("facebookresearch/fairscale", "146f160241651e1211c4247979f159a4ef43b54a", parts=("fairscale",)),
    (
        Replaced(
            f"{_FAIR}/mappings.py",
            "fairscale_mappings.py",
            (
                "_reduce",
                "_split",
                "_gather",
                "_CopyToModelParallelRegion",
                "_ReduceFromModelParallelRegion",
                "_ScatterToModelParallelRegion",
                "_GatherFromModelParallelRegion",
                "copy_to_model_parallel_region",
                "reduce_from_model_parallel_region",
                "scatter_to_model_parallel_region",
                "gather_from_model_parallel_region",
            ),
        ),
        Replaced(
            f"{_FAIR}/cross_entropy.py",
            "fairscale_loss.py",
            ("_VocabParallelCrossEntropy", "vocab_parallel_cross_entropy"),
        ),
        Replaced("fairscale/nn/moe/moe_layer.py", "deepspeed_moe.py", ("_AllToAll",)),
    ),
    _fairscale_load,
    (
        _copy("copy_to_model_parallel_region", lambda m, x, w: m.copy_to_model_parallel_region(x)),
        _reduce("reduce_from_model_parallel_region", lambda m, x, w: m.reduce_from_model_parallel_region(x)),
        Case(
            "scatter_to_model_parallel_region",
            lambda m, x, w: m.scatter_to_model_parallel_region(x),
            sliced(1),
            all_rows(3, 0, dim=1),
            same=True,
            uneven=(3, 2, 2),
        ),
        Case(
            "gather_from_model_parallel_region",
            lambda m, x, w: m.gather_from_model_parallel_region(x),
            gathered(1),
            rows(3, 0, dim=1),
            once=True,
        ),
        Case(
            "vocab_parallel_cross_entropy",
            lambda m, x, w: m.cross_entropy.vocab_parallel_cross_entropy(x, _targets(sum(w.sizes))),
            lambda xs, w: (
                [cross_entropy(torch.cat(list(xs), 1), _targets(sum(w.sizes)), reduction="none")] * w.size
            ),
            rows(3, 0, dim=1),
            once=True,
        ),
        Case(
            "moe_layer._AllToAll",
            lambda m, x, w: m.moe_layer._AllToAll.apply(w.group, x),
            _exchanged,
            all_rows(0, 3),
            uneven=None,
        ),
    ),
    Tests(
        ("tests/__init__.py", "tests/nn/__init__.py", "tests/nn/model_parallel", "tests/nn/moe"),
        (
            "tests/nn/model_parallel/test_layers.py",
            "tests/nn/model_parallel/test_cross_entropy.py",
            "tests/nn/moe/test_moe_layer.py",
        ),
        standins=("cuda",),
        variables=(("STANDIN_GPUS", "2"),),
    ),
    _fairscale_prepare,
    left="four of its tests, of layers and of the loss, fail before and after: they ask for the random states of GPUs.",
)

PARALLEL = (
    MEGATRON,
    DEEPSPEED,
    NANOTRON,
    XFORMERS,
    VERL,
    VEOMNI,
    FASTVIDEO,
    MEGABLOCKS,
    TORCHTITAN,
    FAIRSCALE,
)
"""Those that are compared."""
