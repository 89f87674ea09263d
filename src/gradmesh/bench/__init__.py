"""Measurements: `gradmesh modes` runs every verb in every autodiff mode, here and in other systems.

cases.py      what a verb has to compute, densely in one process, and on which operands
modes.py      how a case is differentiated: the same code for ranks and for the dense program
systems.py    what is measured: a system is a name and a way to call each verb
ours.py       gradmesh as a system
peers.py      torch.distributed.nn.functional, functional collectives, DTensor, spmd_types
cell.py       one run on ranks, and the verdict on it
grid.py       all runs
report.py     the tables
command.py    what the command line calls
"""
