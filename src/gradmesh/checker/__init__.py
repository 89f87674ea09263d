"""`gradmesh check`: what is wrong with the gradients of a script that knows nothing of gradmesh.

findings.py    the list of what can be found (rules), what a check returns, and the baseline of known findings
run.py         the script on local ranks, recorded and judged
hooks.py       what is hooked while the script runs: torch.distributed, autograd, optimizers, wrappers
recorder.py    one rank's run: every operator, collective and backward, in `trace.py`'s records
replay.py      the recorded run again, as one process with the data of all ranks
judging/       compares the two: gradients, calls of own Functions, values, parameters after the step
command.py     the command line's side: options, files, exit status
lines.py       the lines of a finding, and the picture of a run
report.py      a verdict as text for people, and as SARIF 2.1.0 for code hosts
"""
