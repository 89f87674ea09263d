"""Timelines of real runs: what each rank computes, launches, sends and waits for; and artificial network delays.

    middleware.py  base class of transport middleware that receives the kind and size of each transfer
    delay.py       `delayed`: every transfer takes at least the time of a cost model
    recorder.py    records a rank's calls, waits and backward passes
    timeline.py    `timeline`, and the `Timeline` of one or several ranks
    picture.py     its picture, with matplotlib

Events and trace files are those of the simulator (`gradmesh.verify.simulator.trace`).
"""

from gradmesh.verify.timelines.delay import delayed
from gradmesh.verify.timelines.timeline import Timeline, timeline

__all__ = ["Timeline", "delayed", "timeline"]
