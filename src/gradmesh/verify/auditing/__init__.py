"""The audit of a custom collective: which typed law its backward obeys, and what else is wrong with it.

* `audit`: entry point and command
* `findings`: the kinds of findings (severity, meaning, remedy) and the report
* `subject`: on a rank, the code under audit: how it is called, its forbidden writes, the settings it reads
* `probes`: random operands, forward and backward on them, and the ranks that run them
* `readings`: the typed readings of a map, and which of them its gradient obeys
* `opening`, `adjoint`, `conditions`: the checks

The audit itself does not communicate: each rank runs the function on operands drawn from a seed, and the calling
process, which receives the results of all ranks, analyzes them.
"""
