"""`gradmesh check`: what is wrong with the gradients of a script that knows nothing of gradmesh.

rules.py       the one list of what can be found
findings.py    what a check returns
run.py         the script on local ranks, recorded and judged
command.py     the command line's side: options, files, exit status
report.py      a verdict as text for people
sarif.py       a verdict as SARIF 2.1.0, for code hosts
baseline.py    findings that are known, by fingerprints that survive edits elsewhere
"""
