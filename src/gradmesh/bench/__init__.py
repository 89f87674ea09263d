"""`gradmesh bench`: times of the verbs, and their overhead over raw calls of torch.distributed.

`raw` makes these calls, `timing` times both with torch's timer, `command` prints and writes the results.
"""
