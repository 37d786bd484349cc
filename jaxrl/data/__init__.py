"""Reads problems, demonstrations and preferences, tokenises them, and streams them in a shuffled order."""

from jaxrl.data.preferences import Preference
from jaxrl.data.row_layouts import Record

__all__ = ["Preference", "Record"]
