"""`python -m jaxrl COMMAND ...` is `jaxrl COMMAND ...`."""

import sys

from jaxrl import cli

if __name__ == "__main__":
    sys.exit(cli.main(["jaxrl", *sys.argv[1:]]))
