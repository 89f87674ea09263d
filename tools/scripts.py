"""Play the scripts of tests/scripts and print how far their gradients are from differences of their losses.

$ python -m tools.scripts                     # all of them
$ python -m tools.scripts --only megatron     # those whose name has it
"""

from __future__ import annotations

import collections
import time

from tests.scripts import SCRIPTS, Script
from tests.scripts.evidence import shown
from tests.scripts.running import derivatives
from tools.pages import parser_of


def factors(script: Script) -> str:
    """The distinct factors of gradients beside the true derivatives, each with the parameters that have it."""
    having: dict[str, list[str]] = collections.defaultdict(list)
    for one in derivatives(script):
        having[" ".join(f"{x:.4g}" for x in dict.fromkeys(round(f, 5) for f in one.factors))].append(one.name)
    return "; ".join(f"{factor} ({len(which)}: {which[0]})" for factor, which in having.items())


def main(argv: list[str] | None = None) -> int:
    """Play what is asked for; 1 if a script is not shown to be what it should."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", default=[""], help="scripts whose name has one of these")
    parser.add_argument("--factors", action="store_true", help="gradients beside the true derivatives")
    args = parser.parse_args(argv)
    failed = 0
    for script in (s for s in SCRIPTS.values() if any(part in s.name for part in args.only)):
        start = time.perf_counter()
        try:
            seen = shown(script)
            said = seen or "NOT SHOWN"
        except RuntimeError as error:
            seen, said = None, f"NOT SHOWN: {str(error).strip().splitlines()[-1][:100]}"
        failed += seen is None
        if args.factors and script.expected not in ("GM401", "GM402", "GM501"):
            said += "; " + factors(script)
        seconds = time.perf_counter() - start
        print(f"{script.name:36} {script.expected or 'none':6} {seconds:5.1f} s  {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
