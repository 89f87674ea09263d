"""`gradmesh bench`: how long the verbs take here, and what they add to the raw calls of torch.distributed.

`raw` makes these calls, `timing` puts both under torch's timer on ranks, `command` shows and writes what came out.
"""
