"""The programs of the grader `code` in a sandbox: one runs the tests of a row, the other one calls a program.

    check_tests     tests, values of calls    ->  the calls that the tests make, and which tests hold
    call_program    program, calls            ->  a report a line, on the error output

Each runs in a sandbox of its own, because a program must not meet an expected value: it could read it in the
frames above its own, or return what equals everything. So the tests run where the program is not, with a
`Remote` for each name that the program must define. A call of one is noted, and where its value is not known
yet, the test goes on with a value that agrees with everything. Then the program is called, and the tests run
again with the values, until they make the same calls as before.

What crosses is data of Python's own types. Objects of classes that the row defines cross as their fields. All
other objects stay with the program, and the tests have a `Remote` of them. This module needs only Python, as
it runs without the package.
"""

from __future__ import annotations

import base64
import builtins
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import importlib
import io
import itertools
import json
import marshal
import operator
import os
import random
import re
import sys
import types
import weakref
from collections import abc
from collections.abc import Callable, Sequence
from typing import Any

TEST, OWN, SETUP = "test", "own", "setup"
"""Statements of a row: tests of the program, those that do not depend on it, and all others."""

# A generator is read no further: it may be endless.
_MAX_ITEMS = 1_000
# Tests that make more calls are refused: a loop may not end before the values are known.
_MAX_CALLS, _MAX_AGREED = 20_000, 2_000
# Types that JSON does not have: the parts of a value, and the value of such parts. The first one that fits.
TYPES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: (list, tuple),
    set: (list, set),
    frozenset: (list, frozenset),
    collections.deque: (list, collections.deque),
    collections.Counter: (lambda x: list(x.items()), lambda x: collections.Counter(dict(x))),
    collections.OrderedDict: (lambda x: list(x.items()), collections.OrderedDict),
    collections.defaultdict: (
        lambda x: [x.default_factory, list(x.items())],
        lambda x: collections.defaultdict(*x),
    ),
    dict: (lambda x: list(x.items()), dict),
    abc.KeysView: (list, lambda x: dict.fromkeys(x).keys()),
    abc.ValuesView: (list, lambda x: dict(enumerate(x)).values()),
    abc.ItemsView: (list, lambda x: dict(x).items()),
    bytes: (list, bytes),
    bytearray: (list, bytearray),
    range: (lambda x: [x.start, x.stop, x.step], lambda x: range(*x)),
    complex: (lambda x: [x.real, x.imag], lambda x: complex(*x)),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    datetime.datetime: (str, datetime.datetime.fromisoformat),
    datetime.date: (str, datetime.date.fromisoformat),
    datetime.time: (str, datetime.time.fromisoformat),
    datetime.timedelta: (
        lambda x: [x.days, x.seconds, x.microseconds],
        lambda x: datetime.timedelta(*x),
    ),
}
_NAMED: Any = collections.namedtuple
_CHANGING = (list, dict, set, bytearray, collections.deque)
_BY_NAME = {kind.__name__: made for kind, (_, made) in TYPES.items()}
_PLAIN = (type(None), bool, int, float, str, list, *TYPES)


class Refused(BaseException):
    """The tests of a row ask for what cannot be told from here; the message says what."""


class _NotKnown(Exception):
    """A test needs a value that is asked for in this turn; it goes on in the next."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """Writes values as JSON and reads them.

        (1, [2.5, None])  ->  [{"tuple": [1, [2.5, null]]}, []]
        Node(1, None)     ->  [{"instance": 0}, [["Node", {"value": 1, "left": null}]]]

    Attributes:
      space: names of the program or of the tests.
      classes: names of classes that both define. Their objects cross as fields, and may form rings.
      write: writes a value of any other type; it gets the function that writes the value's parts, too.
      read: reads what `write` of the other side has made, by its name.
    """

    space: dict[str, Any]
    classes: Sequence[str]
    write: Callable[[Any, Callable[[Any], Any]], Any]
    read: Callable[[str, Any], Any]

    def encoded(self, value: Any) -> Any:
        """Returns a value in JSON's types."""
        instances: list[Any] = []
        places: dict[int, int] = {}

        def part(value: Any) -> Any:
            kind = type(value)
            if kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
                return part(value.item())
            if kind.__module__ == "numpy" and getattr(value, "shape", None):
                return {"ndarray": [str(value.dtype), part(value.tolist())]}
            if kind.__name__ in self.classes and isinstance(value, enum.Enum):
                return {"member": [kind.__name__, value.name]}
            if value is None or isinstance(value, (bool, float, str)):
                return value
            if isinstance(value, int):
                # JSON's reader refuses more than 4,300 decimal digits.
                return value if abs(value) < 1 << 64 else {"int": hex(value)}
            if isinstance(value, list):
                return [*map(part, value)]
            if isinstance(value, tuple) and hasattr(kind, "_fields"):
                return {"namedtuple": [kind.__name__, [*kind._fields], [*map(part, value)]]}
            if isinstance(value, abc.Iterator) and kind.__module__ in ("builtins", "itertools"):
                return {"iterator": part([*itertools.islice(value, _MAX_ITEMS + 1)])}
            for each, (parts, _) in TYPES.items():
                if isinstance(value, each):
                    found = part(parts(value))
                    if isinstance(value, abc.Set):
                        # Texts have other hashes in each process, but a call must stay the same.
                        found.sort(key=json.dumps)
                    return {each.__name__: found}
            if kind.__name__ in self.classes:
                if id(value) not in places:
                    places[id(value)] = len(instances)
                    instances.append(value)
                return {"instance": places[id(value)]}
            return self.write(value, part)

        body, table = part(value), []
        # Grows meanwhile. No recursion, as lists of nodes may be long.
        for instance in instances:
            slots = [n for kind in type(instance).__mro__ for n in getattr(kind, "__slots__", ())]
            names = [
                n for n in (*getattr(instance, "__dict__", ()), *slots) if hasattr(instance, n)
            ]
            fields = {name: part(getattr(instance, name)) for name in names}
            table.append([type(instance).__name__, fields])
        return [body, table]

    def decoded(self, message: Any) -> Any:
        """Returns the value that `encoded` was given."""
        body, table = message
        kinds = [self.space[name] for name, _ in table if name in self.classes]
        instances = [kind.__new__(kind) for kind in kinds]

        def whole(value: Any) -> Any:
            if isinstance(value, list):
                return [*map(whole, value)]
            if not isinstance(value, dict):
                return value
            ((name, parts),) = value.items()
            parts = whole(parts)
            if name in _BY_NAME:
                return _BY_NAME[name](parts)
            if name == "int":
                return int(parts, 16)
            if name == "instance":
                return instances[parts]
            if name == "member" and parts[0] in self.classes:
                return self.space[parts[0]][parts[1]]
            if name == "namedtuple":
                return _NAMED(parts[0], parts[1])(*parts[2])
            if name == "ndarray":
                return importlib.import_module("numpy").array(parts[1], parts[0])
            if name == "iterator":
                return itertools.chain(parts[:_MAX_ITEMS], _no_more(parts))
            return self.read(name, parts)

        for instance, (_, fields) in zip(instances, table, strict=True):
            for name, parts in fields.items():
                # Fields of frozen classes, too.
                object.__setattr__(instance, name, whole(parts))
        return whole(body)


def _no_more(items: list[Any]) -> abc.Iterator[Any]:
    if len(items) > _MAX_ITEMS:
        raise Refused(f"they read more than {_MAX_ITEMS} items of a generator")
    yield from ()


def _space(name: str, imports: str) -> dict[str, Any]:
    """The names of a module, which dataclasses look up; random numbers are the same in each process."""
    random.seed(0)
    module = sys.modules[name] = types.ModuleType(name)
    _execute(imports, vars(module))
    return vars(module)


def _execute(source: str, space: dict[str, Any]) -> None:
    exec(compile(source, space["__name__"], "exec", dont_inherit=True), space)


# The program's sandbox


def call_program() -> None:
    """Executes the program of the standard input, then the calls, and writes a report of each."""
    given = json.load(sys.stdin)
    sys.stdin, sys.stderr = io.StringIO(), io.StringIO()
    space = _space("solution", given["imports"])
    for definition in given["definitions"]:
        try:
            _execute(definition, space)
        except Exception:
            # A program that needs it fails at its name.
            continue
    # What a module happens to call by this name is not the program's.
    for name in given["names"]:
        space.pop(name, None)
    _execute(given["program"], space)
    for name in given["names"]:
        if hasattr(space.get("Solution"), name):
            # A new object for each call, so that none finds what another has left.
            space[name] = lambda *args, _name=name, **kwargs: getattr(space["Solution"](), _name)(
                *args, **kwargs
            )
        if name not in space:
            return
    kept: dict[str, Any] = {name: space[name] for name in given["names"]}
    copies: list[Any] = []
    for key, call in given["calls"]:
        report = _report(key, call, kept, copies, space, given["classes"])
        left = json.dumps(report).encode() + b"\n"
        while left:
            left = left[os.write(2, left) :]


def _report(
    key: str,
    call: Any,
    kept: dict[str, Any],
    copies: list[tuple[weakref.ref[Any], str, Callable[[], Any]]],
    space: dict[str, Any],
    classes: list[str],
) -> dict[str, Any]:
    """The value of a call, or what it raises, and the arguments that it has changed.

    `kept` has the values that the tests have a `Remote` of, `copies` the variables of the tests that their
    functions read here.
    """
    inner = itertools.count(1)

    def write(value: Any, part: Callable[[Any], Any]) -> Any:
        handle = key if value is kept.get(key, kept) else f"{key}.{next(inner)}"
        kept[handle] = value
        kind = type(value)
        compares = kind.__module__ != "solution" and kind.__eq__ is not object.__eq__
        return {"remote": [handle, kind.__name__, compares]}

    def read(name: str, parts: Any) -> Any:
        if name == "remote":
            return kept[parts]
        if name == "function":
            code = marshal.loads(base64.b64decode(parts[0]))
            names = {**space, **parts[1]}
            cells = tuple(map(types.CellType, parts[3]))
            function = types.FunctionType(code, names, "", tuple(parts[2]), cells)
            if code.co_name in code.co_names:
                names[code.co_name] = function
            owner = weakref.ref(function)
            copies.extend((owner, n, functools.partial(names.get, n)) for n in parts[1])
            for name, cell in zip(code.co_freevars, cells, strict=True):
                copies.append((owner, name, lambda cell=cell: cell.cell_contents))
            return function
        module, path = parts
        value = types.SimpleNamespace(**space) if module == "tests" else sys.modules.get(module)
        value = value or importlib.import_module(module)
        return operator.attrgetter(path)(value) if path else value

    def spelled(value: Any) -> str:
        return json.dumps(Codec(space, classes, named, read).encoded(value))

    def state(value: Any) -> str:
        changing = type(value).__name__ in classes or isinstance(value, _CHANGING)
        return spelled(value) if changing else ""

    def variables() -> list[tuple[str, str]]:
        return [(name, spelled(value())) for _, name, value in copies]

    def named(value: Any, part: Callable[[Any], Any]) -> Any:
        return {"remote": id(value)}

    # Of functions that an earlier call has left with an object of the program, too.
    copies[:] = [copy for copy in copies if copy[0]() is not None]
    codec, held = Codec(space, classes, write, read), []
    try:
        function, args, kwargs = codec.decoded(call)
        before, held = [*map(state, args)], variables()
        value = kept[key] = function(*args, **kwargs)
        # An object of the class under test stays one, whatever else it inherits from.
        own = isinstance(function, type) and type(value).__module__ == "solution"
        report = [write(value, state), []] if own else codec.encoded(value)
        changed = [
            [n, codec.encoded(x)] for n, x in enumerate(args) if before[n] and state(x) != before[n]
        ]
        report = {"value": report, "changed": changed}
    except (Exception, SystemExit) as error:
        names = [kind.__name__ for kind in type(error).__mro__]
        report = {"raised": [names, codec.encoded([*error.args])]}
    written = [name for (name, was), (_, now) in zip(held, variables(), strict=False) if was != now]
    return report | {"written": written[:1]}


# The sandbox of the tests

_READ, _CALL, _USE = 1, 2, 4
_ALL = _READ | _CALL | _USE


class Remote:
    """A value of the program that is not here: an object of a class of its own, or one that is not known yet.

    A value that is not known agrees with everything, so that a test goes on to its next calls. Of an object
    the tests may read attributes, and what a call returns may be called in turn. More would let a program
    answer for itself: with a `__sub__` of its own it would be as near to any number as it likes. Objects of
    classes that are themselves under test (`Stack` in "s = Stack(); s.push(1)") have all their methods. None
    is ever asked what it equals.

    Attributes:
      _of: the session; the key of the value, "" if nobody can ask for it; the rights; the name of its type,
        "" as long as it is not known; and whether that is a type of a library with an equality of its own.
    """

    __slots__ = ("_of",)

    def __init__(self, session: Any, key: str, rights: int, kind: str, compares: bool = False):
        of = types.SimpleNamespace(
            session=session, key=key, rights=rights, kind=kind, compares=compares
        )
        object.__setattr__(self, "_of", of)

    def _ask(self, right: int, function: Any, *args: Any) -> Any:
        of = self._of
        if of.rights & right:
            known, unknown = (_ALL, _CALL) if of.rights & _USE else (_READ, 0)
            return of.session.ask(function, (self, *args), {}, known, unknown)
        if function is bool:
            # A program's own object is true, whatever its `__bool__` says.
            return True
        if not of.kind:
            return of.session.agreeing()
        raise Refused(
            f"they use an object of the program's type {of.kind}, of which they may read attributes alone"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            # Libraries look for their protocols.
            raise AttributeError(name)
        return self._ask(_READ, getattr, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask(_USE, setattr, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        of = self._of
        if not of.rights & _CALL:
            return self._ask(_CALL, None)
        rights = _ALL if of.rights & _USE else _READ | _CALL
        # Objects of a class under test are taken for such before they are known.
        unknown = _ALL if of.key in of.session.tested else 0
        return of.session.ask(self, args, kwargs, rights, unknown)

    def __instancecheck__(self, value: Any) -> Any:
        if not isinstance(value, Remote):
            raise Refused(f"they ask whether a value is of the program's class {self._of.key}")
        return self._of.session.ask(isinstance, (value, self), {}, _READ, 0)

    def __eq__(self, other: Any) -> Any:
        for each in (self, other):
            if isinstance(each, Remote) and not each._of.kind:
                return each
        of = self._of
        if other is None:
            return False
        if type(other) in _PLAIN and not of.compares and not of.rights & _USE:
            # Whatever its own `__eq__` says.
            return False
        raise Refused(
            f"they compare an object of {of.kind}, and only the program knows what equals it"
        )

    def __ne__(self, other: Any) -> Any:
        return found if isinstance(found := self == other, Remote) else not found

    def __iter__(self) -> Any:
        found = self._ask(_READ, itertools.chain)
        return iter(()) if isinstance(found, Remote) else found


def _method(function: Any, otherwise: Any) -> Callable[..., Any]:
    def method(self: Remote, *args: Any) -> Any:
        found = self._ask(_USE if function else 0, function, *args)
        fits = otherwise is None or isinstance(found, type(otherwise))
        return found if fits else otherwise

    return method


# What an object of a class under test is asked for, and Python's types for it.
_METHODS = {
    **{"len": (len, 0), "bool": (bool, True), "str": (str, ""), "repr": (repr, "")},
    **{"contains": (operator.contains, True), "getitem": (operator.getitem, None)},
    **{"setitem": (operator.setitem, None), "delitem": (operator.delitem, None)},
    **{"next": (next, None), "hash": (None, 0), "float": (None, 1.0), "index": (None, 1)},
    **dict.fromkeys(["lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "round"], (None, None)),
}
for _name in [
    "add",
    "sub",
    "mul",
    "matmul",
    "truediv",
    "floordiv",
    "mod",
    "pow",
    "and",
    "or",
    "xor",
]:
    _METHODS |= {_name: (None, None), f"r{_name}": (None, None)}
for _name, _what in _METHODS.items():
    setattr(Remote, f"__{_name}__", _method(*_what))


@contextlib.contextmanager
def _raises(kinds: Any, match: str | None = None) -> abc.Iterator[Any]:
    """The `raises` of pytest, which need not be installed in a sandbox."""
    found = types.SimpleNamespace(value=None)
    try:
        yield found
    except kinds as error:
        if isinstance(error, _NotKnown) or (match and not re.search(match, str(error))):
            raise
        found.value = error
    else:
        raise AssertionError("nothing is raised")


class _Session:
    """One run of the tests, with the reports of the calls that an earlier run has made."""

    def __init__(self, given: dict[str, Any]):
        self._known, self.tested = given["known"], set(given["tested"])
        self.calls: list[Any] = []
        self._counts = collections.Counter[str]()
        self._classes = given["classes"]
        self.space = _space("tests", given["imports"])
        self._imported = set(self.space)
        stub: Any = types.SimpleNamespace(raises=_raises)
        self.space |= {"pytest": stub, "raises": _raises}
        sys.modules["pytest"] = stub
        self.space |= {"jaxrl_equals": self._equals, "jaxrl_fail": self._fail}
        for name in given["names"]:
            rights = _ALL if name in self.tested else _READ | _CALL
            self.space[name] = Remote(self, name, rights, "function")

    def ask(self, function: Any, args: Any, kwargs: Any, known: int, unknown: int) -> Any:
        """Returns what a call returns, or raises what it raises, if that is known.

        Args:
          function: what is called with `args` and `kwargs` where the program is.
          known, unknown: rights on the value if it is an object, or while it is not known.
        """

        def read(name: str, parts: Any) -> Any:
            handle, kind, compares = parts
            assert name == "remote", "a program reports no functions"
            return Remote(self, str(handle), known, str(kind) or "object", bool(compares))

        codec = Codec(self.space, self._classes, self._write, read)
        call = codec.encoded([function, [*args], kwargs])
        text = json.dumps(call)
        self._counts[text] += 1
        key = "#" + hashlib.sha256(f"{self._counts[text]} {text}".encode()).hexdigest()[:16]
        self.calls.append([key, call])
        if len(self.calls) > _MAX_CALLS:
            raise Refused(f"they make more than {_MAX_CALLS} calls")
        if key not in self._known:
            return Remote(self, key, unknown, "")
        try:
            report = json.loads(self._known[key])
            for name in report["written"]:
                raise Refused(f"the program calls a function of theirs that changes {name!r}")
            if "raised" in report:
                names, details = report["raised"]
                value = self._error(names, codec.decoded(details))
            else:
                value = codec.decoded(report["value"])
                for place, changed in report["changed"]:
                    _update(args[place], codec.decoded(changed))
        except Exception:
            # A report that was cut, or is forged.
            self.failed = True
            raise
        if "raised" in report:
            # It would end a loop of the tests: "all(map(f, xs))".
            self.failed |= isinstance(value, StopIteration) and function is not next
            raise value
        return value

    def agreeing(self) -> Remote:
        """Returns a value that agrees with everything, but not for ever: a loop may wait for its end."""
        self._agreed += 1
        if self._agreed > _MAX_AGREED:
            raise _NotKnown
        return Remote(self, "", 0, "")

    def _error(self, names: list[str], details: list[Any]) -> BaseException:
        """An exception of the first class that the tests know, with the names of all."""
        known = (self.space.get(name, getattr(builtins, name, None)) for name in names)
        kind = next(x for x in known if isinstance(x, type) and issubclass(x, BaseException))
        error = kind.__new__(kind, *details)
        error.kinds = names  # pyright: ignore[reportAttributeAccessIssue]
        return error

    def _write(self, value: Any, part: Callable[[Any], Any]) -> Any:
        if isinstance(value, Remote):
            if not value._of.key:
                raise _NotKnown
            return {"remote": value._of.key}
        if isinstance(value, types.ModuleType):
            return {"global": [value.__name__, ""]}
        if isinstance(value, types.FunctionType) and value.__module__ == "tests":
            code = value.__code__
            inner = [code, *(x for x in code.co_consts if isinstance(x, types.CodeType))]
            used = {name for each in inner for name in each.co_names} - self._imported
            names = {n: self.space[n] for n in used - {code.co_name} if n in self.space}
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            spelled = base64.b64encode(marshal.dumps(code)).decode()
            return {
                "function": [spelled, *map(part, (names, [*(value.__defaults__ or ())], cells))]
            }
        path, owner = getattr(value, "__qualname__", "<"), getattr(value, "__self__", None)
        if "<" not in path and (owner is None or isinstance(owner, types.ModuleType)):
            return {"global": [getattr(value, "__module__", None) or "builtins", path]}
        raise Refused(f"they give the program an object of {type(value).__name__}")

    def _equals(self, value: Any, *expected: Any) -> None:
        self.held = [bool(listed(value) == each) for each in expected]

    def _fail(self) -> None:
        self.failed = True

    def holds(self, kind: str, source: str, readings: int) -> list[bool]:
        """Executes a statement; returns in which readings of the row it holds."""
        self.failed, self.held, self._agreed = False, [True] * readings, 0
        try:
            _execute(source, self.space)
        except Refused:
            raise
        except BaseException as error:
            # Python's words for "except X" with an X of the program.
            if kind == OWN or str(error).startswith("catching classes"):
                raise Refused(f"{source[:80]!r} raises {type(error).__name__}: {error}") from error
            self.failed = True
        return [held and not self.failed for held in self.held]


def _update(old: Any, new: Any) -> None:
    """Makes an argument what the program has made of it."""
    if isinstance(old, _CHANGING):
        old.clear()
        (old.update if isinstance(old, (dict, set)) else old.extend)(new)
    else:
        for name, value in vars(new).items():
            object.__setattr__(old, name, value)


def listed(value: Any) -> Any:
    """A value whose tuples are lists: the expected values of JSON are never tuples."""
    if isinstance(value, (list, tuple)):
        return [listed(part) for part in value]
    if isinstance(value, dict):
        return {name: listed(part) for name, part in value.items()}
    return value


def check_tests() -> None:
    """Runs the tests of the standard input and prints their calls, and which tests hold or why none can."""
    given = json.load(sys.stdin)
    output, sys.stdout = sys.stdout, io.StringIO()
    results, refused = [], ""
    session = _Session(given)
    try:
        for kind, source in given["statements"]:
            held = session.holds(kind, source, given["readings"])
            if kind == TEST:
                results.append(held)
    except Refused as reason:
        session.calls, refused = [], str(reason)
    print(json.dumps([session.calls, results, refused]), file=output)
