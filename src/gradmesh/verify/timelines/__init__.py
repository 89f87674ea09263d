"""What the ranks of a real run worked, began, sent and waited for; and a wire that is as slow as a test says.

    through.py     a transport that says of each motion what it is and what it sends; the two below are made of it
    delay.py       `delayed`: every motion takes at least what a cost model says
    recorder.py    what a rank notes while it is watched
    work.py        what a rank worked, from that
    timeline.py    `timeline`, and the `Timeline` of one rank or of all
    picture.py     the picture of it, with matplotlib

The trace file is that of the simulator (`gradmesh.verify.simulator.trace`), and so are the events.
"""

from gradmesh.verify.timelines.delay import delayed
from gradmesh.verify.timelines.timeline import Timeline, timeline

__all__ = ["Timeline", "delayed", "timeline"]
