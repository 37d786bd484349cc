"""Finds recipes: files of a user, and those that come with the package, by name."""

from __future__ import annotations

import difflib
import pathlib

from jaxrl.errors import UserError
from jaxrl.user_code import bundled_recipes

_HERE = pathlib.Path("configs")
_MAX_LISTED = 8


def recipe_path(recipe: str) -> str:
    """Returns the file of a recipe.

    Args:
      recipe: path of a file; or name of a recipe in `configs/` here or in the package, with or without ".py".

    Raises:
      UserError: there is neither; names similar recipes.
    """
    if pathlib.Path(recipe).is_file():
        return recipe
    name = recipe.removesuffix(".py")
    if recipe and "/" not in name:
        for folder in (_HERE, bundled_recipes()):
            if (folder / f"{name}.py").is_file():
                return str(folder / f"{name}.py")
    raise UserError(f'no recipe file "{recipe}"; {recipes_near(recipe)}')


def recipes_near(recipe: str) -> str:
    """Returns text that suggests recipes: those with a similar name, otherwise the first few."""
    given = pathlib.Path(recipe)
    beside = given.parent.glob("*.py") if given.name else ()
    here = {file.stem: str(file) for file in sorted({*beside, *_HERE.rglob("*.py")})}
    bundled = {file.stem: file.stem for file in sorted(bundled_recipes().glob("*.py"))}
    known = bundled | here
    near = difflib.get_close_matches(given.stem, known)
    if near:
        return "near: " + ", ".join(known[stem] for stem in near)
    return "such as " + ", ".join(list((here or bundled).values())[:_MAX_LISTED])
