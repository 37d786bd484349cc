"""A teacher: a frozen policy of another size or family, which a student is to approach (distillation)."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from jaxrl.checks import PATH, check_fields
from jaxrl.roles.policy import Reference


@dataclasses.dataclass(frozen=True)
class TeacherConfig:
    """The teacher of dataflows that distil one (`dataflows.distill`).

    Attributes:
      weights: Hugging Face directory of a language model; it has the student's tokens.
    """

    weights: Annotated[str, PATH] = ""

    def __post_init__(self):
        check_fields(self)


class Teacher(Reference):
    """A frozen policy with a model of its own. It reads the student's tokens as they are."""
