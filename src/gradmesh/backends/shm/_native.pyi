"""The data path in C: native.c. It is there if it could be built."""

LAYOUT: int

def attach(lines: int, even: int, odd: int, chunks: int, rank: int, size: int, chunk: int, /) -> object: ...
def run(
    memory: object,
    op: int,
    kind: int,
    itemsize: int,
    out: int,
    given: int,
    count: int,
    extra: int,
    sizes: int,
    bits: int,
    flags: int,
    epoch: int,
    pauses: int,
    yields: int,
    nanoseconds: int,
    /,
) -> int: ...
