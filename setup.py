"""Copies the recipes of `configs/` into the wheel, as `jaxrl/recipes/`; all else is in pyproject.toml."""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Builds the package with its recipes; an editable install reads them from `configs/`."""

    def run(self):
        """Builds, then copies."""
        super().run()
        if not self.editable_mode:
            recipes = pathlib.Path(self.build_lib, "jaxrl", "recipes")
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree("configs", recipes, dirs_exist_ok=True, ignore=ignored)


setup(cmdclass={"build_py": BuildWithRecipes})
