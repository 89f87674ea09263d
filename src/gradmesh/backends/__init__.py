"""gradmesh's backends for torch.distributed: `shm` for process ranks on one host, `threads` for thread ranks.

Both are pure Python subclasses of torch's `ProcessGroup`. They share:

    process_group.py  OwnGroup: the interface of a group for torch.distributed and for gradmesh's data path
    works.py          torch's `Work` of a pending call, several works as one, and futures
    verbs/reductions.py     the reductions, by torch's names
    call_check.py     the properties of a call that ranks compare
    messages.py       errors of both backends
"""
