"""A small helper process that reports the sudden death of the process it watches.

    python host_witness.py REMEDY

Each line of its input names the watched process and its current phase. After an orderly end the watched
process kills its witness. If instead the input ends, the watched process died without time for a message:
killed by the kernel for want of memory, or by a person. This file imports nothing else, so that it starts
quickly and stays small.
"""

import sys


def main() -> None:
    """Waits for the end of the input, then prints the message."""
    last = ""
    for line in sys.stdin:
        last = line.rstrip("\n")
    print(
        f"error: {last} was ended before it could say why: by a signal, or for want of memory; {sys.argv[1]}",
        file=sys.stderr,
        flush=True,
    )


if __name__ == "__main__":
    main()
