"""From tapes to findings.

judge.py             the order of the questions, and what stands in the way of an answer: hangs, errors (GM4xx, GM5xx)
parameters.py        what each parameter got at a step, and what one process would have given it
functions.py         a call that makes a right gradient wrong: Functions, hidden collectives (GM102 to GM108)
sums_and_factors.py  no call is at fault: missing or doubled sums and factors, norms (GM101 to GM112, GM204, GM205)
values.py            values that should be equal on ranks, or should not: copies, data, masks (GM2xx, GM3xx, GM403)
origins.py           the operator at which a wrong gradient first differs
context.py           a step that is being judged, for all of them
"""
