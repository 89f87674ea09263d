"""A simulator of distributed programs: hundreds of ranks, reproducible orders, a log of every collective and its cost.

* `simulate`: `simulate`: the ranks, their order, the observer of their calls, and runs of a single rank
* `costs`: bytes, rounds and times of calls; links, and the clocks of ranks
* `trace`: events and trace files, also those of `gradmesh.verify.timeline`
"""
