"""torch's profiler on every rank: one trace of all ranks, and a table of the collectives.

    recording.py   `profiled`, which starts the profiler of a process and gives each of its ranks its entries
    clocks.py      the offset of a rank's clock from that of rank 0
    profile.py     `Profile`: joining ranks, the trace file, the table

`gradmesh.verify.timeline` records transfers and waits; the profiler shows what each thread and device does.
"""

from gradmesh.verify.profiles.profile import Profile
from gradmesh.verify.profiles.recording import profiled

__all__ = ["Profile", "profiled"]
