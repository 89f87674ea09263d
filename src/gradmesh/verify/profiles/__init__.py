"""torch's profiler on every rank: one trace of all, and a table of the collectives.

    recording.py   `profiled`, which starts the profiler of a process and hands each of its ranks its part
    clocks.py      how far a rank's clock is from that of rank 0
    profile.py     `Profile`: the parts put together, the file, the table

`gradmesh.verify.timeline` notes what is on the wire and who waits; this shows what each thread and device did.
"""

from gradmesh.verify.profiles.profile import Profile
from gradmesh.verify.profiles.recording import profiled

__all__ = ["Profile", "profiled"]
