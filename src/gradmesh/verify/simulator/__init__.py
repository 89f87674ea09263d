"""A simulator of distributed programs: hundreds of ranks, orders that come back, every collective seen, and its cost.

`simulate` runs a program on ranks that are threads. What happens, from the bottom:

* `counting` says how many bytes a call moves, `costs` in how many rounds, `model` how long that
  takes on a link, `wire` when a call begins and ends.
* `clocks` say what time it is: the machine's, or each rank's own.
* `schedule` lets one rank run at a time, in an order that a seed decides.
* `notes` make events of calls, `events` are the table of them, `trace` a file of them for Perfetto.
* `watching` is the observer that a world of threads has while it is simulated; `lone` one for a world in which a
  single rank plays, and `alone` the thread of that rank.
* `simulate` puts them together.
"""

from gradmesh.verify.simulator.events import Event, Events
from gradmesh.verify.simulator.model import CostModel, Link
from gradmesh.verify.simulator.simulate import Simulation, simulate

__all__ = ["CostModel", "Event", "Events", "Link", "Simulation", "simulate"]
