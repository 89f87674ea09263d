"""The audit of anyone's collective: which typed law its backward obeys, and what else is wrong with it.

    audit.py       the entry: the checks, one after another
    kinds.py       the one list of what can be found: severity, meaning, remedy
    report.py      what an audit returns
    pool.py        the ranks that a function runs on, and what ends them
    subject.py     a rank's side: what `build` returned, and how it is called
    trees.py       a rank's side: the tensors in what it takes and returns
    probes.py      a rank's side: forward and backward on drawn operands
    watch.py       a rank's side: what was written that may not be
    switches.py    a rank's side: choices that the function's code reads
    readings.py    the typed readings of a map, and which of them its gradient obeys
    checks/        one file for each group of kinds

The audit itself sends nothing: the ranks run the function on operands that each draws from a seed, and what comes
out is judged by the caller, who sees all ranks.
"""

from gradmesh.verify.auditing.audit import audit
from gradmesh.verify.auditing.kinds import KINDS, Kind
from gradmesh.verify.auditing.report import Audit, Finding

__all__ = ["KINDS", "Audit", "Finding", "Kind", "audit"]
