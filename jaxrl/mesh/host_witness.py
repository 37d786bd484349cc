"""A small helper process that reports the sudden death of the process it watches.

    python host_witness.py REMEDY

Each line of its input names the watched process and its current phase. After an orderly end the watched
process kills its witness. If instead the input ends, the watched process died without time for a message:
killed by the kernel for want of memory, by a person, or by JAX because process 0 is gone. This file imports
nothing else, so that it starts quickly and stays small.
"""

import sys


def main() -> None:
    """Waits for the end of the input, then prints the message."""
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
