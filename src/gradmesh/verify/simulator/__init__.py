"""A simulator of distributed programs: hundreds of ranks, reproducible orders, a log of every collective and its cost.

`simulate` runs a program on thread ranks. The modules, bottom up:

* `counting` computes the bytes of a call, `costs` the rounds of an algorithm, `model` the time on a link, and `links`
  the start and end of each call.
* `clocks`: wall-clock time, or a virtual clock for each rank.
* `schedule`: runs one rank at a time, in an order given by a seed.
* `notes` creates events from calls, `events` is their table, `trace` writes them to a file for Perfetto.
* `watching` is the observer of a simulated world; `single_rank` is used when only one rank runs.
* `simulate` is the entry point.
"""

from gradmesh.verify.simulator.events import Event, Events
from gradmesh.verify.simulator.model import CostModel, Link
from gradmesh.verify.simulator.simulate import Simulation, simulate

__all__ = ["CostModel", "Event", "Events", "Link", "Simulation", "simulate"]
