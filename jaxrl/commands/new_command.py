"""Writes a recipe to start from.

jaxrl new my_recipe          writes my_recipe.py, with a comment at each setting
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.user_code import bundled_recipes


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("name", help="name of the recipe, and of the folder of its results")
    name = parser.parse_args(arguments).name.removesuffix(".py")
    # The name is also that of a folder and, in the file, of a Python string.
    if re.fullmatch(r"[A-Za-z]\w*", name) is None:
        raise UserError(f"{name!r} is no name of a recipe; take letters, digits and underscores")
    path = pathlib.Path(f"{name}.py")
    text = (bundled_recipes() / "shared" / "new_recipe.py").read_text()
    try:
        # A recipe of this name is somebody's work.
        with path.open("x") as file:
            file.write(text.replace("NEW_RECIPE", name))
    except FileExistsError as error:
        raise UserError(f"{path} is there already; take another name") from error
    except OSError as error:
        raise UserError(f"{path} cannot be written here: {error.strerror}") from error
    print(f"{path} is yours to change; check it with: jaxrl train --config {path} --dry_run")
    return 0
