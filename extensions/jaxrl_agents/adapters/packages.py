"""Packages of environments: imported when an adapter is made, since none of them is a dependency of jaxrl."""

import importlib
from typing import Any

from jaxrl.errors import UserError


def package(module: str, distribution: str) -> Any:
    """The module of an optional package.

    Args:
      module: name of the module.
      distribution: what pip calls the package, with the release that is tested.

    Raises:
      UserError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"the environments of {module} cannot be used ({error}); run pip install {distribution!r}"
        ) from error
