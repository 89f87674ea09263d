"""The audit of a custom collective: which typed law its backward obeys, and what else is wrong with it.

    audit.py       entry point: runs the checks one after another
    kinds.py       the list of finding kinds: severity, meaning, remedy
    report.py      the result of an audit
    pool.py        starts the ranks, sends them work, replaces them after a crash or hang
    subject.py     on a rank: what `build` returned, and how it is called
    probes.py      on a rank: forward and backward on random operands
    watch.py       on a rank: detects forbidden in-place writes
    switches.py    on a rank: global settings that the function's code reads
    readings.py    the typed readings of a map, and which of them its gradient obeys
    checks/        one file for each group of kinds

The audit itself does not communicate: each rank runs the function on operands drawn from a seed, and the calling
process, which receives the results of all ranks, analyzes them.
"""

from gradmesh.verify.auditing.audit import audit
from gradmesh.verify.auditing.kinds import KINDS, Kind
from gradmesh.verify.auditing.report import Audit, Finding

__all__ = ["KINDS", "Audit", "Finding", "Kind", "audit"]
