"""The backends that gradmesh brings along: `shm` for ranks that are processes of one host, `threads` for threads.

Both are backends of torch.distributed in pure Python: torch takes a Python subclass of `ProcessGroup` for the whole
group. What the two share stands here, once:

    process_group.py  OwnGroup: what a group owes torch.distributed, and what it owes gradmesh's own data path
    works.py          what a call that was begun owes torch, several of them as one, and its future
    reductions.py     the reductions, by torch's names
    claim.py          what a rank says about a call, for the others to compare
    words.py          errors that both raise
"""
