"""`gradmesh check`: what is wrong with the gradients of a script that knows nothing of gradmesh.

findings.py    the list of what can be found (rules), what a check returns, and the baseline of known findings
run.py         the script on local ranks, recorded and judged
hooks.py       what is hooked while the script runs: torch.distributed, autograd, optimizers, wrappers
observed.py    what else a program does: samplers, handles, sharded state
trace.py       the tape: the records of one rank's run
recorder.py    one rank's run: every operator, collective, verb of gradmesh and backward, as a tape
replay.py      the recorded run again, as one process with the data of all ranks
judging/       compares the two, and makes the findings: a file for each family of rules
picture.py     the types of what each line makes, and a picture of them
report.py      a verdict as text for people, and as SARIF 2.1.0 for code hosts
command.py     the command line's side: options, files, exit status
"""
