"""Cut a periodic graph of nearest neighbours over ranks; show what is sent, and how far it is from one process.

python -m tools.graphs                              # 20,000 nodes on 4 ranks by space
python -m tools.graphs --ranks 5 --empty            # the same on 4, and a rank that owns nothing
python -m tools.graphs --partition count            # cut by number: nearly everything is sent
python -m tools.graphs --nodes 200000 --only-rows   # what is sent alone
python -m tools.graphs figures --help               # the figures of docs/reports/graphs-scale.md
"""

from __future__ import annotations

import sys

from tools.graphs import figures
from tools.graphs.measure import Job, Part, measured
from tools.pages import parser_of

ENOUGH = 0.15
CLOSE = 1e-10


def text(job: Job, parts: list[Part]) -> str:
    """The figures."""
    sent, gathered = sum(part.sent for part in parts), sum(part.gathered for part in parts)
    bytes_sent = sent * job.width * 8
    lines = [
        f"{job.nodes} nodes, {job.nodes * job.neighbours} edges, rows of {job.width} float64; cut by {job.partition}",
        "rank      own   remote     sent   of a whole gather",
        *(
            f"{rank:<4}{part.own:>9}{part.remote:>9}{part.sent:>9}   {part.sent / max(part.gathered, 1):.1%}"
            for rank, part in enumerate(parts)
        ),
        f"all{sum(p.own for p in parts):>10}{sum(p.remote for p in parts):>9}{sent:>9}   {sent / gathered:.2%}"
        if gathered
        else "one rank sends nothing",
        f"bytes of an exchange {bytes_sent} = {sent} rows x {job.width} x 8",
        f"the plan is built in {max(p.building for p in parts):.3f} s, rebuilt in "
        f"{max(p.rebuilding for p in parts):.3f} s",
        *(
            f"largest deviation of {name} from one process {max(part.deviations[name] for part in parts):.1e}"
            for name in parts[0].deviations
        ),
    ]
    return "\n".join(lines)


def main() -> int:
    """Measure; 1 where ranks cut by space send more than 15 % of a whole gather, or are further off than 1e-10."""
    parser = parser_of(__doc__, "python -m tools.graphs")
    parser.add_argument("--nodes", type=int, default=20_000)
    parser.add_argument("--neighbours", type=int, default=12)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--empty", action="store_true", help="the last rank owns nothing")
    parser.add_argument("--partition", choices=("bisection", "curve", "count"), default="bisection")
    parser.add_argument("--backend", choices=("threads", "shm", "gloo"), default="threads")
    parser.add_argument("--only-rows", action="store_true", help="do not run the network")
    args = parser.parse_args()
    job = Job(
        args.nodes, args.neighbours, args.width, args.ranks, args.empty, args.partition, not args.only_rows
    )
    parts = measured(job, args.backend)
    print(text(job, parts))
    sent, gathered = sum(part.sent for part in parts), sum(part.gathered for part in parts)
    far = max((value for part in parts for value in part.deviations.values()), default=0.0)
    too_much = job.partition != "count" and job.nodes >= 20_000 and sent > ENOUGH * gathered
    return int(too_much or not far <= CLOSE)


if __name__ == "__main__":
    sys.exit(figures.main(sys.argv[2:]) if sys.argv[1:2] == ["figures"] else main())
