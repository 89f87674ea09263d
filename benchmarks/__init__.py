"""What compares gradmesh with other systems. Run from the root of the repository; none of it is in the wheel.

    python -m benchmarks.modes                  every verb in every autodiff mode, here and in other systems
    python -m benchmarks.speed                  how long each collective takes, here and in other systems
    python -m benchmarks.ddp_step               a DDP step on shm and on Gloo
    python -m benchmarks.compare OLD NEW        two files of `benchmarks.speed --json` against each other

Each has `--help`. The peers that are no part of torch are in requirements.txt beside this file; a system that is not
installed is left out, and the tables say so.

systems/        what is compared: cases, and how each system calls them
modes/          the table of verbs and autodiff modes
speed/          the tables of times, and the promises held against them
ddp_step.py     a step of training under DDP
compare.py      what became slower from one run to another
machine.py      what was measured on
terminal.py     what the commands have in common
"""
