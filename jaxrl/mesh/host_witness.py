"""The process beside one of a run of several: it says who that was if it ends without a word.

    python host_witness.py REMEDY

Each line of its input says who is watched and in which phase it is. It is killed when all is well; if its
input ends before that, so has the other process, and whatever ended it left it no time: the kernel, for want
of memory; a person; or JAX, when process 0 is gone. Imports nothing, so that it starts quickly and is small.
"""

import sys


def main() -> None:
    """Waits, and says it."""
    last = ""
    for line in sys.stdin:
        last = line.rstrip("\n")
    print(
        f"error: {last} was ended before it could say why: by a signal, for want of memory, or by JAX, whose "
        f"service goes with process 0 (then its report stands above); {sys.argv[1]}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
