"""Tests of removed extensions, and of what stands on them, are not collected."""

import importlib.util

_PACKAGES = (
    *("agents", "answers", "browse", "code", "planner", "pods", "serving", "tinker", "verl"),
)
_STAND_ON_SERVING = {"agents", "browse", "tinker"}

_removed = {name for name in _PACKAGES if importlib.util.find_spec(f"jaxrl_{name}") is None}
collect_ignore = sorted(_removed | (_STAND_ON_SERVING if "serving" in _removed else set()))
