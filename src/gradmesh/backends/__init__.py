"""gradmesh's backends for torch.distributed: `shm` for process ranks on one host, `threads` for thread ranks.

Both are pure Python subclasses of torch's `ProcessGroup`. They share:

    process_group.py  OwnGroup: the interface of a group for torch.distributed and for gradmesh's data path; torch's
                      `Work` of a pending call, several works as one, and futures; reductions and errors of both
    torch_names.py    the names under which torch's versions call a group's methods
"""
