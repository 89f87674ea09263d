"""What is compared: the cases, and how gradmesh and each other system call them.

cases.py      what a verb has to compute, densely in one process, and on which operands
system.py     what a system is: a name, and for each case a way to make the call
ours.py       gradmesh
peers.py      torch.distributed.nn.functional, functional collectives, DTensor, spmd_types
"""
