"""A function that is typed again is the same one; one that does something else is another one."""

import itertools
import subprocess
import sys

import pytest

from jaxrl.function_identity import function_digest

_CELLS = itertools.count()


def typed(cell: str):
    """The function `f` of a notebook's cell, which has a file name of its own each time it runs."""
    names = {"__name__": "__main__"}
    exec(compile(cell, f"<cell {next(_CELLS)}>", "exec"), names)
    return names["f"]


# Each with two values that make two functions of it.
CELLS = {
    "a number in it": ("def f(r): return [{} for _ in r.texts]", "1", "2"),
    "a lambda": ("f = lambda r: {}", "1", "2"),
    "its default": ("def f(r, a={}): return a", "1", "2"),
    "its keyword's default": ("def f(r, *, a={}): return a", "1", "2"),
    "the order of its parameters": ("def f({}): return a - b", "a, b", "b, a"),
    "a method that it calls": ("def f(r): return r.{}()", "lower", "upper"),
    "a global": ("a = {}\ndef f(r): return a", "[1, [2]]", "[1, [3]]"),
    "a type alone": ("a = {}\ndef f(r): return a", "1", "True"),
    "a dict": ("a = {}\ndef f(r): return a", "{'x': {'y': 1}}", "{'x': {'y': 2}}"),
    "a set": ("a = {}\ndef f(r): return a", "{'x', 'y', 'z'}", "{'x', 'y', 'w'}"),
    "a closure": ("def g(a):\n    return lambda r: a\nf = g({})", "[1]", "[2]"),
    "an array": ("import numpy\na = numpy.arange(6) * {}\ndef f(r): return a", "1", "2"),
    "an array of JAX": ("import jax\na = jax.numpy.ones(3) * {}\ndef f(r): return a", "1", "2"),
    "a compiled helper": (
        "import jax\n@jax.jit\ndef g(x): return x * {}\ndef f(r): return g(1)",
        "1",
        "2",
    ),
    **{
        f"how jax.jit compiles it: {option}": (
            "import jax\ndef g(x, n=1, m=2): return x\n"
            f"h = jax.jit(g, {option}={{}})\ndef f(r): return h(r)",
            one,
            other,
        )
        for option, one, other in (
            ("static_argnums", "1", "2"),
            ("static_argnames", "'n'", "'m'"),
            ("donate_argnums", "0", "1"),
            ("in_shardings", "None", "(None, None)"),
            ("compiler_options", "{}", "{'xla_cpu_enable_fast_math': True}"),
        )
    },
    "how many values a cached helper keeps": (
        "import functools\n@functools.lru_cache(maxsize={})\ndef g(): return 1\ndef f(r): return g()",
        "1",
        "2",
    ),
    "an attribute of a compiled helper": (
        "import jax\n@jax.jit\ndef g(x): return x\ng.a = {}\ndef f(r): return g.a",
        "1",
        "2",
    ),
    "an attribute of a static method": (
        "class K:\n    g = staticmethod(len)\n    g.a = {}\ndef f(r): return vars(K)['g'].a",
        "1",
        "2",
    ),
    "a property's class": (
        "class P(property):\n    a = {}\nclass K:\n    g = P()\ndef f(r): return K.g.a",
        "1",
        "2",
    ),
    "a cached helper": (
        "import functools\n@functools.cache\ndef g(): return {}\ndef f(r): return g()",
        "1",
        "2",
    ),
    "a helper": ("def g(): return {}\ndef f(r): return g()", "1", "2"),
    "a helper's helper": (
        "def h(): return {}\ndef g(): return h()\ndef f(r): return g()",
        "1",
        "2",
    ),
    "a function inside it": ("def f(r):\n    def g(): return {}\n    return g()", "1", "2"),
    "a partial": (
        "import functools\ndef g(a, r): return a\nf = functools.partial(g, {})",
        "1",
        "2",
    ),
    "an attribute of an object": (
        "class K:\n    def __init__(self, a): self.a = a\n    def __call__(self, r): return self.a\n"
        "f = K({})",
        "1",
        "2",
    ),
    "a slot of an object": (
        "class K:\n    __slots__ = ('a',)\n    def __call__(self, r): return self.a\n"
        "f = K()\nf.a = {}",
        "1",
        "2",
    ),
    "a method's class": (
        "class K:\n    def g(self): return {}\n    def f(self, r): return self.g()\nf = K().f",
        "1",
        "2",
    ),
    "a base class": (
        "class A:\n    a = {}\nclass K(A):\n    def __call__(self, r): return self.a\nf = K()",
        "1",
        "2",
    ),
    "a dataclass": (
        "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass K:\n    a: int = {}\n"
        "    def __call__(self, r): return self.a\nf = K()",
        "1",
        "2",
    ),
    "a static method": (
        "class K:\n    @staticmethod\n    def g(r): return {}\nf = K.g",
        "1",
        "2",
    ),
    "a property": (
        "class K:\n    @property\n    def a(self): return {}\n    def __call__(self, r): return self.a\n"
        "f = K()",
        "1",
        "2",
    ),
    "a wrapper": (
        "import functools\ndef twice(g):\n    @functools.wraps(g)\n    def h(r): return {} * g(r)\n"
        "    return h\n@twice\ndef f(r): return 1",
        "1",
        "2",
    ),
    "a regular expression": ("import re\na = re.compile('{}')\ndef f(r): return a", "x", "y"),
    "a builtin": ("a = {}\ndef f(r): return a(r)", "len", "max"),
    "a module": ("import {} as a\ndef f(r): return a.sin(r)", "math", "cmath"),
    "a named tuple": (
        "import collections\nT = collections.namedtuple('T', 'x y')\na = T({}, 3)\n"
        "def f(r): return a",
        "1",
        "2",
    ),
    "a table's missing value": (
        "import collections\na = collections.defaultdict(lambda: {})\ndef f(r): return a['x']",
        "1",
        "2",
    ),
    "its attribute": ("def f(r): return f.a\nf.a = {}", "1", "2"),
    "a text with attributes": (
        "class T(str): pass\na = T('x')\na.k = {}\ndef f(r): return a.k",
        "1",
        "2",
    ),
    "a method of a text": (
        "class T(str):\n    def g(self): return {}\na = T('x')\ndef f(r): return a.g()",
        "1",
        "2",
    ),
    "a number that can be called": (
        "class N(int):\n    def __call__(self, r): return {}\nf = N(1)",
        "1",
        "2",
    ),
    "a method of a number of an enumeration": (
        "import enum\nclass E(enum.IntEnum):\n    A = 1\n    def g(self): return {}\na = E.A\n"
        "def f(r): return a.g()",
        "1",
        "2",
    ),
    "a module that a program has made": (
        "import types\nm = types.ModuleType('m')\nm.a = {}\ndef f(r): return m.a",
        "1",
        "2",
    ),
    "a signature": (
        "import inspect\ndef g(a={}): return a\ns = inspect.signature(g)\ndef f(r): return s",
        "1",
        "2",
    ),
    "a model of pydantic": (
        "import pydantic\nclass M(pydantic.BaseModel):\n    a: int = {}\ndef f(r): return M().a",
        "1",
        "2",
    ),
    "a check of a model of pydantic": (
        "import pydantic\nclass M(pydantic.BaseModel):\n    a: int = 1\n    @pydantic.field_validator('a')\n"
        "    def check(cls, a): return a + {}\ndef f(r): return M(a=3).a",
        "1",
        "2",
    ),
    "a set that holds it": (
        "known = set()\ndef f(r): return known, {}\nknown.add(f)",
        "1",
        "2",
    ),
    "objects in each other's sets": (
        "class N:\n    def __init__(self, a): self.a, self.near = a, set()\n"
        "one, other = N(1), N({})\none.near.add(other)\nother.near.add(one)\ndef f(r): return one",
        "1",
        "2",
    ),
    "functions that call each other": (
        "def g(n): return n and f(n - 1)\ndef f(n): return n and g(n - {})",
        "1",
        "2",
    ),
}


@pytest.mark.parametrize(("cell", "one", "other"), CELLS.values(), ids=CELLS)
def test_a_function_is_all_that_it_reaches(cell, one, other):
    digests = [function_digest(typed(cell.replace("{}", value))) for value in (one, one, other)]
    assert digests[0] == digests[1] != digests[2]


def test_lines_and_comments_around_a_function_make_no_other_one():
    plain = typed("def g(): return 1\ndef f(r): return g()")
    moved = typed(
        "# a remark\nunused = 3\n\ndef g():\n    return 1  # one\n\ndef f(r):\n    return g()"
    )
    assert function_digest(plain) == function_digest(moved)


@pytest.mark.parametrize(
    ("cell", "later"),
    [
        (
            "import enum\nclass E(enum.Flag):\n    A = 1\n    B = 2\ndef f(r): return E.A | E.B",
            "f(1)",
        ),
        (
            "from os import environ\ndef f(r): return environ['HOME']",
            "environ['TERMINAL_NUMBER'] = '2'",
        ),
        ("def f(r): return __file__", "__file__ = 'moved.py'"),
        ("import jax\n@jax.jit\ndef f(r): return r * 2", "f(1.0)"),
        ("import functools\n@functools.cache\ndef f(r): return r * 2", "f(1.0)"),
    ],
)
def test_use_and_place_make_no_other_function(monkeypatch, cell, later):
    monkeypatch.setenv("TERMINAL_NUMBER", "1")
    before, after = typed(cell), typed(cell)
    exec(later, after.__globals__ if hasattr(after, "__globals__") else {"f": after})
    assert function_digest(before) == function_digest(after)


def test_another_process_finds_the_same_function():
    """Strings have another order in its sets."""
    code = (
        "from jaxrl.function_identity import function_digest\n"
        "words = {'a', 'b', 'c', 'd', 'e'}\n"
        "def f(r): return r in words or r in {'x', 'y', 'z'}\n"
        "print(function_digest(f))"
    )
    digests = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
        for _ in range(3)
    }
    assert len(digests) == 1


def test_the_files_of_what_it_imports_are_part_of_it(tmp_path, monkeypatch):
    """As they are on disk: the process that calls it reads them there."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "its_helper.py").write_text("import its_deeper\n\ndef score(r):\n    return 1\n")
    (tmp_path / "its_deeper.py").write_text("a = 1\n")
    cells = [
        "import its_helper\ndef f(r): return its_helper.score(r)",
        "from its_helper import score\ndef f(r): return score(r)",
        "from its_helper import score as f",
    ]
    before = [function_digest(typed(cell)) for cell in cells]
    assert before == [function_digest(typed(cell)) for cell in cells]
    (tmp_path / "its_deeper.py").write_text("a = 2\n")
    after = [function_digest(typed(cell)) for cell in cells]
    assert not set(before) & set(after)
