"""Tells whether two functions, typed in a notebook or written in a file, are the same one.

A function is its compiled code and all that it reaches: defaults, closures, globals, functions and classes
that it calls, and the files of the user's modules. The place where it is written is no part of it, so a cell
that runs again makes the same function. A pickle cannot tell that: it differs from one run of a cell to the
next.
"""

from __future__ import annotations

import dis
import hashlib
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from jaxrl.user_code import source_digest

# Attributes that name a place, or repeat what others say.
_OF_THE_PLACE = {
    "__module__",
    "__name__",
    "__qualname__",
    "__doc__",
    "__dict__",
    "__weakref__",
    "__firstlineno__",
    "__static_attributes__",
    "_abc_impl",
    # Values of a flag that have been asked for so far.
    "_value2member_map_",
}

# Classes of `functools.cache` and `jax.jit`, whose pickles hold what they have computed or compiled so far.
_CACHES = ("_lru_cache_wrapper", "PjitFunction")
_OF_TORCH = ("Tensor", "Parameter")
# Its others are made of these and of the class's own attributes; some hold ids.
_OF_PYDANTIC = ("__pydantic_fields__",)
# Subclasses have code and attributes of their own.
_PLAIN = (bool, int, float, complex, str, type(...))


def function_digest(function: Callable[..., Any]) -> str:
    """A digest of a function, or of any object that can be called, that is the same for the same function."""
    return hashlib.sha256("\0".join(_described(function, {})).encode()).hexdigest()


def _described(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[str]:
    """Texts that differ for different values.

    Args:
      value: any value that a function holds.
      seen: number of each mutable object so far, and the object itself, which keeps its id from being used
        again. Functions may call each other in a ring.
    """
    yield f"<{type(value).__module__}.{type(value).__qualname__}"
    if value is None or type(value) in _PLAIN:
        yield repr(value)
    elif type(value) in (bytes, bytearray):
        yield hashlib.sha256(value).hexdigest()
    elif id(value) in seen:
        yield f"seen {seen[id(value)][0]}"
    else:
        seen[id(value)] = (len(seen), value)
        yield from _inside(value, seen)
    yield ">"


def _inside(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[str]:
    if isinstance(value, types.ModuleType) and sys.modules.get(value.__name__) is not value:
        # Made by the program, not by an import.
        parts: Any = tuple(_attributes(value))
    elif isinstance(value, types.ModuleType):
        parts = (value.__name__, source_digest(value.__name__))
    elif value is os.environ:
        # The machine's; it differs from one terminal to the next.
        parts = ()
    elif isinstance(value, types.CodeType):
        parts = _code(value)
    elif isinstance(value, type | types.FunctionType) and _is_imported(value):
        parts = (value.__module__, value.__qualname__, source_digest(value.__module__))
    elif isinstance(value, types.FunctionType):
        parts = _function(value)
    elif isinstance(value, type):
        parts = (value.__bases__, type(value), *_attributes(value))
    elif isinstance(value, types.MethodType):
        parts = (value.__func__, value.__self__)
    elif isinstance(value, property):
        parts = (type(value), value.fget, value.fset, value.fdel, *_attributes(value))
    elif isinstance(value, staticmethod | classmethod) or type(value).__qualname__ in _CACHES:
        # How it was wrapped is among the attributes, such as the static arguments of `jax.jit`.
        parts = (type(value), value.__wrapped__, *_attributes(value))
    elif type(value).__qualname__ == "PjitInfo":
        parts = tuple(value._replace(fun_sourceinfo=None))
    elif isinstance(value, types.CellType):
        parts = _cell(value)
    elif type(value) in (dict, types.MappingProxyType):
        parts = tuple(part for item in value.items() for part in item)
    elif type(value) in (set, frozenset):
        # In no order of their own: that of strings differs between processes. Each member is described from
        # here on its own; it may hold the set.
        yield from sorted("\0".join(_described(part, dict(seen))) for part in value)
        return
    elif type(value) in (list, tuple):
        parts = tuple(value)
    elif type(value).__qualname__ in _OF_TORCH and type(value).__module__.startswith("torch"):
        # Their pickles differ from time to time.
        parts = (value.tolist(), str(value.dtype), value.requires_grad)
    else:
        parts = _reduced(value)
    for part in parts:
        yield from _described(part, seen)


def _is_imported(value: Any) -> bool:
    """Whether another process finds a function or class by importing its module."""
    module = sys.modules.get(value.__module__)
    if module is None or value.__module__ == "__main__" or "<locals>" in value.__qualname__:
        return False
    found: Any = module
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _code(code: types.CodeType) -> tuple[Any, ...]:
    # Without the file, the line numbers and the name.
    return (
        code.co_code,
        code.co_consts,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
    )


def _function(function: types.FunctionType) -> tuple[Any, ...]:
    # The file is its place.
    names = sorted(_globals_of(function.__code__) - {"__file__"})
    used = {name: function.__globals__.get(name) for name in names}
    return (
        function.__code__,
        function.__defaults__,
        function.__kwdefaults__,
        function.__closure__,
        used,
        # A wrapper's function, and attributes that the function reads of itself.
        vars(function),
    )


def _globals_of(code: types.CodeType) -> set[str]:
    names = {
        step.argval
        for step in dis.get_instructions(code)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    inner = (_globals_of(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return names.union(*inner)


def _attributes(value: Any) -> Iterator[Any]:
    """The attributes of an object, without those of its class: name, value, name, value, ..."""
    own = getattr(value, "__dict__", {})
    for name in sorted(own.keys() - _OF_THE_PLACE):
        is_slot = isinstance(own[name], types.GetSetDescriptorType | types.MemberDescriptorType)
        if not is_slot and (name in _OF_PYDANTIC or not name.startswith("__pydantic_")):
            yield name
            yield own[name]


def _cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # a variable that is not set yet
        return ()


def _reduced(value: Any) -> tuple[Any, ...]:
    """What pickle would write of an object: class and state, of an array its bytes."""
    if isinstance(value, types.BuiltinFunctionType) and isinstance(
        value.__self__, types.ModuleType | None
    ):
        return (value.__module__, value.__qualname__)
    try:
        reduced = value.__reduce_ex__(4)
    except (TypeError, pickle.PicklingError):
        # Left to cloudpickle, which knows more kinds.
        return (cloudpickle.dumps(value),)
    if isinstance(reduced, str):  # the name of a global of its module
        return (getattr(value, "__module__", None), reduced)
    made_by, arguments, *state = reduced
    # Items are iterators.
    rest = [part if n < 1 or part is None else tuple(part) for n, part in enumerate(state)]
    return (made_by, arguments, *rest)
