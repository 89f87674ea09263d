"""What compares gradmesh with other systems. Run from the root of the repository; none of it is in the wheel.

    python -m benchmarks.modes                  every verb in every autodiff mode, here and in other systems
    python -m benchmarks.speed                  how long each collective takes, here and in other systems
    python -m benchmarks.ddp_step               a DDP step on shm and on Gloo
    python -m benchmarks.compare OLD NEW        two files of `benchmarks.speed --json` against each other

Each has `--help`. requirements.txt beside this file lists the compared systems outside of torch; the tables mark those
that are not installed.

systems/        the compared systems, and the cases that they run
modes/          the table of verbs and autodiff modes
speed/          the tables of times, and the performance targets
ddp_step.py     a step of training under DDP
compare.py      regressions between two runs
machine.py      description of the machine
terminal.py     helpers shared by the commands
"""
