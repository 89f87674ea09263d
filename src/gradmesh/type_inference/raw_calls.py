"""The operators of torch's two families of collectives: what each is, the argument it takes, and where it writes."""

from __future__ import annotations

__all__ = ["COLLECTIVES"]

_WRITING = {
    "allreduce_": ("all_reduce", "tensors", "tensors"),
    "allreduce_coalesced_": ("all_reduce", "tensors", "tensors"),
    "allgather_": ("all_gather", "input_tensors", "output_tensors"),
    "_allgather_base_": ("all_gather", "input_tensor", "output_tensor"),
    "allgather_coalesced_": ("all_gather_each", "input_list", "output_lists"),
    "allgather_into_tensor_coalesced_": ("all_gather_each", "inputs", "outputs"),
    "reduce_scatter_": ("reduce_scatter", "input_tensors", "output_tensors"),
    "_reduce_scatter_base_": ("reduce_scatter", "input_tensor", "output_tensor"),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_each", "inputs", "outputs"),
    "broadcast_": ("broadcast", "tensors", "tensors"),
    "reduce_": ("reduce", "tensors", "tensors"),
    "gather_": ("gather", "input_tensors", "output_tensors"),
    "scatter_": ("scatter", "input_tensors", "output_tensors"),
    "alltoall_": ("all_to_all", "input_tensors", "output_tensors"),
    "alltoall_base_": ("all_to_all_flat", "input", "output"),
    "send": ("send", "tensors", ""),
    "recv_": ("recv", "", "tensors"),
    "recv_any_source_": ("recv", "", "tensors"),
    "barrier": ("barrier", "", ""),
    "monitored_barrier_": ("barrier", "", ""),
}
"""Operators that write: what they are, what they take and where they write."""

_MAKING = {
    "all_reduce": ("all_reduce", "input", ""),
    "all_reduce_": ("all_reduce", "input", "input"),
    "all_reduce_coalesced": ("all_reduce", "inputs", ""),
    "all_reduce_coalesced_": ("all_reduce", "inputs", "inputs"),
    "all_gather_into_tensor": ("all_gather", "input", ""),
    "all_gather_into_tensor_out": ("all_gather", "input", "out"),
    "all_gather_into_tensor_coalesced": ("all_gather_each", "inputs", ""),
    "reduce_scatter_tensor": ("reduce_scatter", "input", ""),
    "reduce_scatter_tensor_out": ("reduce_scatter", "input", "out"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_each", "inputs", ""),
    "all_to_all_single": ("all_to_all_flat", "input", ""),
    "broadcast": ("broadcast", "input", ""),
    "broadcast_": ("broadcast", "input", "input"),
}
"""Those that make their result, mostly."""

COLLECTIVES = {"c10d": _WRITING, "_c10d_functional": _MAKING}
"""By namespace and name: the kind, the argument that is taken, and that which is written; "" where there is none."""
