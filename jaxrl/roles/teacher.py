"""Settings of a teacher.

A teacher is a `roles.policy.Reference` with its own model, of any size or family with the student's
vocabulary. The student learns to approach it (distillation).
"""

from __future__ import annotations

from typing import Annotated

from jaxrl.checks import PATH, settings


@settings
class TeacherConfig:
    """The teacher of a distillation dataflow (`dataflows.distill`)."""

    weights: Annotated[str, PATH] = ""
    """Hugging Face directory of a language model with the student's vocabulary."""
