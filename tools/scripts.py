"""Play the scripts of tests/scripts and print how far their gradients are from differences of their losses.

$ python -m tools.scripts                     # all of them
$ python -m tools.scripts --only megatron     # those whose name has it
"""

from __future__ import annotations

import argparse
import collections

from tests.scripts import SCRIPTS, Script
from tests.scripts.running import derivatives, play


def factors(script: Script) -> str:
    """The distinct factors of gradients beside the true derivatives, each with the parameters that have it."""
    having: dict[str, list[str]] = collections.defaultdict(list)
    for one in derivatives(script):
        having[" ".join(f"{x:.4g}" for x in dict.fromkeys(round(f, 5) for f in one.factors))].append(one.name)
    return "; ".join(f"{factor} ({len(which)}: {which[0]})" for factor, which in having.items())


def main(argv: list[str] | None = None) -> int:
    """Play what is asked for; 1 if a script that should not has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[""], help="scripts whose name has one of these")
    parser.add_argument("--no-derivatives", action="store_true", help="only run them")
    args = parser.parse_args(argv)
    failed = 0
    for script in (s for s in SCRIPTS.values() if any(part in s.name for part in args.only)):
        played = play(script)
        error = next((seen.error.strip().splitlines()[-1] for seen in played.ranks if seen.error), "")
        meant = script.expected in ("GM401", "GM402", "GM501")
        said = "hung" if played.hung else error
        if not said and not args.no_derivatives and not meant:
            try:
                said = factors(script)
            except RuntimeError as problem:
                said = "DERIVATIVES " + str(problem).strip().splitlines()[-1]
        failed |= bool((played.hung or error) and not meant)
        print(f"{script.name:34} {script.expected or 'none':6} {played.seconds:5.2f} s  {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
