"""Code against unit tests: what passes, and what a program may try instead."""

import base64
import itertools
import json
import pickle
import time
import zlib

import numpy as np
import pytest

from jaxrl.data import row_layouts
from jaxrl.errors import UserError
from jaxrl.rewards import Graders, GradingTask, Response
from jaxrl.types import TRUTHS
from jaxrl_code import unit_tests
from jaxrl_code.code_grader import program_of, run_tests, same_output


def sample(text, answer, **row):
    return Response(text, np.zeros(1, np.int32), GradingTask(answer, **row))


def block(program):
    return f"Here it is:\n```python\n{program}\n```\nDone."


def passed(program, tests, seconds=2.0, **fields):
    text = tests if isinstance(tests, str) else json.dumps(tests)
    return run_tests((program, text, fields, seconds, "none"))


@pytest.fixture(scope="module")
def graders():
    """In the first sandbox that works here, or in none: what passes is the same."""
    sources = {"parts": ("code", {"part_marks": True})}
    options = {"cpu_seconds": 1.0}
    try:
        graders = Graders(("code", {}), sources, **options, code_sandbox="auto")
    except UserError:
        graders = Graders(("code", {}), sources, **options, code_sandbox="none")
    yield graders
    graders.close()


SUM = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]})
ASSERTS = json.dumps(
    ["assert add(1, 2) == 3", "assert add([1], [2]) == [1, 2]", "assert not add(0, 0)"]
)


@pytest.mark.parametrize(
    ("tests", "program"),
    [
        (SUM, "print(sum(map(int, input().split())))"),
        (SUM, "if __name__ == '__main__':\n    print(sum(map(int, open(0).read().split())), '')"),
        (ADD, "def add(a, b):\n    return a + b"),
        (ADD, "class Solution:\n    def add(self, a, b):\n        return a + b"),
        (ASSERTS, "import math\ndef add(a, b):\n    return a + b"),
        ("assert add(1, 2) == 3\nassert add(1, 2) > 2", "def add(a, b):\n    return a + b"),
    ],
)
def test_a_right_program_passes(graders, tests, program):
    (verdict,) = graders.grade([sample(block(program), tests)])
    assert verdict.correct and verdict.score == 1.0 and program.startswith(verdict.prediction[:10])


CHEATS = {
    "nothing": "",
    "wrong": "def add(a, b):\n    return a - b",
    "syntax": "def add(a, b:",
    "exits": "import sys\nsys.exit(0)",
    "leaves": "import os\nos._exit(0)",
    "equal to all": (
        "class E:\n    def __eq__(self, o): return True\n    def __repr__(self): return 'E()'\n"
        "def add(a, b):\n    return E()"
    ),
    "reports": "import os\nos.write(2, b'\"True\"\\n' * 9)\nos.write(1, b'3')",
    "spins": "while True:\n    pass",
    "sleeps": "import time\ntime.sleep(600)",
    "eats": "x = bytearray(1 << 40)",
    "forks": "import os\nwhile True:\n    os.fork()",
    "floods": "while True:\n    print('0' * 1000)",
    "recurses": "def add(a, b):\n    return add(a, b)",
    "huge": "def add(a, b):\n    return 9**9**9",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_wrong_program_costs_its_time_and_passes_nothing(graders, name):
    if name == "forks" and graders._graders[""][1]._sandbox == "none":
        pytest.skip("nothing would stop it here")
    right = block("def add(a, b):\n    return a + b")
    texts = [(block(CHEATS[name]), SUM), (block(CHEATS[name]), ADD), (right, ADD)]
    verdicts = graders.grade([sample(t, a) for t, a in texts])
    assert [v.correct for v in verdicts] == [False, False, True]
    assert all(v.failure is None for v in verdicts)


# Of each row the values are equal, and equal to none of another row, as Python has it.
EQUAL = [
    ["1", "True", "1.0", "1 + 0j", "__import__('fractions').Fraction(1)"],
    ["0.1 + 0.2", "0.30000000000000004"],
    ["0.3", "3 / 10"],
    ["[1, 2]", "[True, 2.0]"],
    ["(1, 2)", "__import__('collections').namedtuple('P', 'x y')(1, 2)"],
    ["{1, 2}", "frozenset([2, 1])", "{1: 0, 2: 0}.keys()"],
    ["{1: 2}", "__import__('collections').Counter([1, 1])", "{True: 2}"],
    ["{'1': 2}"],
    ["b'ab'", "bytearray(b'ab')"],
    ["'ab'"],
    ["'\\ud800\\n\\0'"],
    ["range(2)", "range(0, 2, 1)"],
    ["[0, 1]"],
    ["None"],
    ["{1: [(2, {3: {'a', 1.5}})]}"],
    ["__import__('datetime').date(2024, 2, 29)"],
    ["__import__('datetime').datetime(2024, 2, 29)"],
    ["__import__('datetime').timedelta(minutes=-1)"],
    ["__import__('decimal').Decimal('0.3')"],
    ["[float('inf'), -0.0]"],
    ["10**4000"],
]


def test_values_are_equal_where_python_finds_them_equal():
    """Each value as the function's, and each as the expected one."""
    values = [value for row in EQUAL for value in row]
    row_of = [n for n, row in enumerate(EQUAL) for _ in row]
    program = "def f(n):\n    return [" + ", ".join(values) + "][n]"
    pairs = list(itertools.product(range(len(values)), repeat=2))
    # Of more than 200 tests the first are taken.
    for start in range(0, len(pairs), 200):
        some = pairs[start : start + 200]
        found = passed(program, [f"assert f({n}) == ({values[m]})" for n, m in some])
        assert found == [row_of[n] == row_of[m] for n, m in some]


@pytest.mark.parametrize(
    "value",
    [
        "type('E', (), {'__eq__': lambda s, o: True})()",
        "type('E', (int,), {'__eq__': lambda s, o: True})(4)",
        "type('E', (list,), {'__eq__': lambda s, o: True})()",
        "lambda: 3",
        "9**9**5",
        "[].__class__",
        "float('nan')",
    ],
)
def test_what_equals_everything_or_cannot_be_told_equals_nothing(value):
    assert passed(f"def f(): return {value}", ["assert f() == 3", "assert 3 == f()"]) == [False] * 2


def test_a_generator_is_read_by_the_check():
    program = "def f(n):\n    while n: yield n; n -= 1"
    asserts = ["assert list(f(2)) == [2, 1]", "assert sorted(f(2)) == [1, 2]", "assert f(1) == [1]"]
    assert passed(program, asserts) == [True, True, False]


TWO_SUM = """class Solution:
    def twoSum(self, nums: List[int], target: int) -> Optional[List[int]]:
        seen = defaultdict(int)
        for i, x in enumerate(nums):
            if target - x in seen: return seen[target - x], i
            seen[x] = i
"""
CALLED = [{"input": "[2, 7, 11]\n9\n", "output": "[0, 1]", "testtype": "functional"}]
PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(CALLED)))).decode()
NODES = "class Node:\n    def __init__(self, v): self.v, self.left = v, None\n"
CHECK = "METADATA = {}\n\n\ndef check(candidate):\n    assert candidate(1.5, 2) == 3.5\n    assert True\n"
ADDS = "def add(a, b):\n    return a + b"


@pytest.mark.parametrize(
    ("program", "tests", "fields"),
    [
        # LiveCodeBench
        (TWO_SUM, CALLED, {"metadata": '{"func_name": "twoSum"}'}),
        (TWO_SUM, CALLED, {"metadata": {"func_name": "twoSum"}}),
        (TWO_SUM, CALLED, {"starter_code": TWO_SUM[:80]}),
        (TWO_SUM, [{**CALLED[0], "metadata": {"func_name": "twoSum"}}], {}),
        (TWO_SUM, PACKED, {"metadata": {"func_name": "twoSum"}}),
        (TWO_SUM, {"inputs": ["[2,7,11]\n9"], "outputs": ["[0,1]"], "fn_name": "twoSum"}, {}),
        ("def f(s): return not s", {"inputs": ['""'], "outputs": ["true"], "fn_name": "f"}, {}),
        ("def f(s): return s", {"inputs": ['"a\\nb"'], "outputs": ['"a\\nb"'], "fn_name": "f"}, {}),
        ("def f(): return None", {"inputs": [""], "outputs": ["null"], "fn_name": "f"}, {}),
        ("print(int(input()) + 1)", [{"input": "1", "output": "2", "testtype": "stdin"}], {}),
        # APPS, TACO, CodeContests
        ("def f(x): return x > 1", {"fn_name": "f", "inputs": [[2], [1]], "outputs": [[True], [False]]}, {}),
        ("def f(x): return x > 1", {"fn_name": "f", "inputs": [[2], [1]], "outputs": [True, False]}, {}),
        ("def f(x): return x > 1", {"fn_name": "f", "inputs": [[2], [1]], "outputs": [[True], False]}, {}),
        ("def f(x): return [x]", {"fn_name": "f", "inputs": [[2], [1]], "outputs": [[2], [1]]}, {}),
        ("def f(x): return (x, (x,))", {"fn_name": "f", "inputs": [[2]], "outputs": [[[2, [2]]]]}, {}),
        ("def f(d): return {k + 1: v for k, v in d.items()}",
         {"fn_name": "f", "inputs": [[{"1": 2}]], "outputs": [{"2": 2}]}, {}),
        ("print(input(), input())", {"inputs": [["1", "2"]], "outputs": [["1 2"]]}, {}),
        ("print(input())", {"inputs": ["1"], "outputs": ["1"], "fn_name": None}, {}),
        ("print(input())", {"input": ["1"], "output": ["1"]}, {}),
        (ADDS, [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": [3]}], {}),
        ("print(input())", [{"type": "stdin_stdout", "input": "1", "output": "1"}], {}),
        # MBPP
        ("def f(x): return math.sqrt(x)", ["assert math.isclose(f(2), 1.414, rel_tol=0.001)"],
         {"test_imports": ["import math"]}),
        (NODES + "def depth(n): return 1 + depth(n.left) if n else 0", ["assert (depth(root)) == 2"],
         {"test_setup_code": "root = Node(1)\r\nroot.left = Node(2)\r\n"}),
        ("def total(nodes): return sum(n.v for n in nodes)", ["assert total([Node(1), Node(2)]) == 3"],
         {"test_setup_code": NODES}),
        ("def f(x): return [x, 1]", ["assert set(f(2)) == set([1, 2])", "assert f(1)[0] == 1 and f(2)"], {}),
        (ADDS, {"test_list": ["assert add(1, 2) == 3"], "test_setup_code": ""}, {}),
        ("def product(a, b): return a * b", ["assert product(2, 3) == 6"], {}),
        ("def sum(a, b): return a + b", ["assert sum(2, 3) == 5"], {}),
        # HumanEval, LeetCodeDataset, KodCode
        (ADDS, CHECK, {"entry_point": "add"}),
        (ADDS, CHECK + "\ncheck(add)\n", {}),
        (ADDS, {"test": CHECK, "entry_point": "add"}, {}),
        (TWO_SUM, "def check(candidate):\n    x = [2, 7]\n    assert candidate(nums=x, target=9) == (0, 1)",
         {"entry_point": "Solution().twoSum"}),
        (ADDS, "from solution import add\n\ndef test_it():\n    x = add(1, 2)\n    assert x == 3", {}),
        (NODES + "def depth(n): return 1 + depth(n.left) if n else 0",
         "def test_one():\n    x = Node(1)\n    x.left = Node(2)\n    assert depth(x) == 2\n"
         "def test_two():\n    x = depth(None)\n    assert x.real == 0", {}),
        ("def f(x): return [x, 1]", ["x = f(2)", "x.sort()", "assert x == [1, 2] and str(x).strip()"], {}),
        (NODES + "class Solution:\n    def depth(self, n): return 1 + self.depth(n.left) if n else 0",
         "def check(candidate):\n    assert candidate(node(1)) == 1",
         {"entry_point": "Solution().depth", "test_setup_code": NODES + "def node(v): return Node(v)"}),
    ],
)  # fmt: skip
def test_a_convention_passes_a_right_program_and_no_empty_one(program, tests, fields):
    found = passed(program, tests, **fields)
    assert found and all(found)
    assert not any(passed("pass", tests, **fields))


@pytest.mark.parametrize(
    ("tests", "fields"),
    [
        (CALLED, {}),
        ([{**CALLED[0], "testtype": "interactive"}], {}),
        ([*CALLED, {"input": "1", "output": "2", "testtype": "stdin"}], {"fn_name": "f"}),
        (CALLED, {"fn_name": "two sum"}),
        (base64.b64encode(zlib.compress(pickle.dumps(print))).decode(), {"fn_name": "f"}),
        ({"fn_name": "f", "inputs": ["abc"], "outputs": ["3"]}, {}),
        ({"fn_name": "f", "inputs": ["1"], "outputs": [3]}, {}),
        ({"fn_name": "f", "inputs": [{"a": 1}], "outputs": [3]}, {}),
        ({"fn_name": "f", "inputs": [5], "outputs": [3]}, {}),
        ({"inputs": [[[1, 2]]], "outputs": ["3"]}, {}),
        ({"inputs": "12", "outputs": "34"}, {}),
        ({"inputs": ["1"]}, {}),
        ([{"input": "1"}], {}),
        ([1, 2], {}),
        (["assert f(1) == 2", {"input": "1", "output": "2"}], {}),
        (CHECK, {}),
        (["assert f(1) == expected"], {}),
        (["assert True"], {}),
        ({"test_list": []}, {}),
        ("add(1, 2) should be 3", {}),
        # Both sides would be the program's own, and names that nothing defines.
        (["assert add(Pair(1, 2)) == Pair(2, 3)"], {}),
        (["assert add(Pair(1, 2)) in [Pair(2, 3), Pair(3, 2)]"], {"fn_name": ""}),
        ("class TestAdd(unittest.TestCase):\n    def test_it(self):\n        assert add(1, 2) == 3", {}),
        ("def test_it(capsys):\n    assert add(1, 2) == 3", {}),
        ("@pytest.mark.parametrize('x', [1])\ndef test_it(x):\n    assert add(x, 2) == 3", {}),
        ({"public_tests": {"input": ["1"]}}, {}),
        ({"public_tests": {"input": ["1", "2"], "output": ["1"]}}, {}),
        ({"language": "cpp", "test_cases": [{"input": "1", "output": "1"}]}, {}),
        ({"test_cases": [{"in": "1", "out": "1"}]}, {}),
        ({"assert_case": [""]}, {}),
        ("def check(candidate):\n    assert candidate(tree_node([1, 2])) == 3",
         {"entry_point": "Solution().total"}),
    ],
)  # fmt: skip
def test_a_row_of_no_convention_is_refused(graders, tests, fields):
    text = tests if isinstance(tests, str) else json.dumps(tests)
    fault = graders.validate(GradingTask(text, fields))
    assert fault and "KeyError" not in fault


def test_an_object_of_no_convention_is_told_which_there_are(graders):
    fault = graders.validate(GradingTask('{"cases": [1]}'))
    for name in ("['cases']", "inputs and outputs", "public_tests", "test_cases", "assert_case"):
        assert name in fault


PAIR = "@dataclass\nclass Pair:\n    a: int\n    b: int\n"
NUMPY = "import numpy as np\n"
STACK = (
    "class Stack(list):\n    def push(self, x): self.append(x)\n"
    "    def top(self): return self[-1]\n    def __len__(self): return 40 + super().__len__()\n"
)
LIST_NODE = (
    "class ListNode:\n    def __init__(self, val, next=None): self.val, self.next = val, next\n"
)
REVERSED = (
    "def check(candidate):\n    first = None\n    for x in range(2000): first = ListNode(x, first)\n"
    "    found, node = [], candidate(first)\n    while node:\n        found.append(node.val)\n"
    "        node = node.next\n    assert found == list(range(2000))\n"
)
REVERSES = (
    "class Solution:\n    def turned(self, node):\n        before = None\n        while node:\n"
    "            node.next, before, node = before, node, node.next\n        return before"
)


# Programs, tests, and which of the tests hold, by hand.
@pytest.mark.parametrize(
    ("program", "tests", "fields", "held"),
    [
        # Loops, comprehensions, helpers, and values that other values depend on.
        ("def f(x): return x * x if x != 7 else 0",
         "def check(candidate):\n    for x in range(7):\n        assert candidate(x) == x * x\n"
         "    for x in range(20):\n        assert candidate(x) == x * x\n"
         "    assert all(candidate(i) == i * i for i in range(7))\n"
         "    assert [candidate(i) for i in (1, 7)] == [1, 49]\n    assert list(map(candidate, [2])) == [4]\n"
         "    assert abs(candidate(1.5) - 2.25) < 1e-6 and abs(candidate(1.5) - 2.5) > 1e-6",
         {"entry_point": "f"}, [True, False, True, False, True, True]),
        ("def zero(xs): return -xs[0] / xs[1]",
         "def poly(xs, x):\n    return sum(c * x**n for n, c in enumerate(xs))\n"
         "def near(xs):\n    assert abs(poly(xs, zero(xs))) < 1e-4\n"
         "near([1, 2])\nnear([1, 2, 1])", {"fn_name": "zero"}, [True, False]),
        ("def f(x): return x + 1", "x = 0\nfor n in range(3):\n    x = f(x)\n    assert x == n + 1", {},
         [True]),
        ("def f(x): return x + 1", "n = 0\nwhile f(n) < 4: n += 1\nassert n == 3 and f(n) == 4", {}, [True]),
        (ADDS, "def check(candidate):\n    import random\n    for i in range(100):\n"
         "        x, y = random.randint(0, 1000), random.randint(0, 1000)\n"
         "        assert candidate(x, y) == x + y", {"entry_point": "add"}, [True]),
        ("def f(xs): return max(xs)", ["assert f({'a', 'b', 'c', 'd', 'e', 'f'}) == 'f'",
         "assert all(f([x]) == x for x in {'a', 'b', 'c', 'd', 'e', 'f'})",
         "assert f({frozenset('abcdef'), frozenset('abcde')} - {frozenset('abcde')}) == set('fedcba')"], {},
         [True, True, True]),
        ("def f(s): return s[::-1]\ndef g(s): return s + '!'", ["assert f(g('ab')) == '!ba'"], {}, [True]),
        # Exceptions
        ("def f(x):\n    if x < 0: raise ValueError(f'{x} is negative')\n    return x",
         "import pytest\nfrom solution import f as g\n"
         "def test_a():\n    with pytest.raises(ValueError, match='-1 is') as e: g(-1)\n"
         "    assert str(e.value) == '-1 is negative'\n"
         "    with pytest.raises(KeyError): g(-1)\n    with pytest.raises(ValueError): g(1)\n"
         "def test_b():\n    try:\n        g(-2)\n        assert 0\n    except ValueError:\n        pass\n"
         "    try:\n        g(2)\n        assert False\n    except ValueError:\n        pass",
         {}, [True, True, False, False, True, False]),
        ("def f(x): raise StopIteration", ["assert all(map(lambda x: f(x) == x, [1, 2]))"], {}, [False]),
        # Classes of the row: their own `__eq__` compares.
        ("def moved(p): return Pair(p.a + 1, p.b)",
         ["assert moved(Pair(1, 2)) == Pair(2, 2)", "assert moved(Pair(1, 2)) == Pair(2, 3)",
          "assert moved(Pair(1, 2)) in {1: [Pair(2, 2)]}[1]"],
         {"test_setup_code": "from dataclasses import dataclass\n" + PAIR}, [True, False, True]),
        ("def next_one(c): return Color(c.value % 2 + 1)",
         ["assert next_one(Color.RED) == Color.BLUE", "assert next_one(Color.RED) is Color.RED"],
         {"test_setup_code": "import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2"},
         [True, False]),
        (LIST_NODE + REVERSES, REVERSED, {"entry_point": "Solution().turned", "test_setup_code": LIST_NODE},
         [True]),
        # Classes of the program: attributes and methods, whose values are compared as data.
        ("from dataclasses import dataclass\n" + PAIR + "def moved(p): return Pair(p.a + 1, p.b)",
         ["assert moved(Pair(1, 2)).a == 2", "assert moved(Pair(1, 2)).b == 3"], {}, [True, False]),
        (STACK, "s = Stack()\ns.push(1)\ns.push(2)\nassert s.top() == 2\nassert len(s) == 42\n"
         "assert s[0] == 1 and 2 in s\nassert s.top() == 1", {}, [True, True, True, False]),
        ("class Node:\n    def __init__(self, v): self.value, self.next = v, None\n"
         "def tail(n): return n.next or n", "n = Node(1)\nn.next = Node(2)\nassert tail(n).value == 2\n"
         "assert tail(n).value == 1\nassert tail(n) != None and tail(n).next is None", {},
         [True, False, True]),
        ("import enum\nclass Color(enum.Enum):\n    RED = 1\ndef f(): return Color.RED",
         ["assert f().name == 'RED' and f().value == 1", "assert f().value == 2"], {}, [True, False]),
        ("from collections import namedtuple\nP = namedtuple('P', 'x y')\ndef f(): return P(1, 2)",
         ["assert f() == (1, 2) and f().y == 2", "assert f() == (1, 3)"], {}, [True, False]),
        ("def f(n): return lambda x: x + n", ["assert f(2)(3) == 5", "assert f(2)(3) == 6"], {},
         [True, False]),
        # What a call does to its arguments, functions as arguments, generators, numbers.
        ("def f(m): m[0][0], m[1] = 7, []",
         "m = [[1], [2]]\nf(m)\nassert m == [[7], []]\nassert m == [[1], [2]]", {}, [True, False]),
        ("def f(g, xs): return [g(x) for x in xs]",
         ["assert f(lambda x: x + 1, [1]) == [2]", "assert f(str.upper, ['a']) == ['A'] == f(str.upper, 'a')",
          "assert f(math.floor, [2.5]) == [2]", "assert f(lambda x: x, [1]) == [2]"], {},
         [True, True, True, False]),
        ("def f():\n    a, b = 0, 1\n    while True:\n        yield a\n        a, b = b, a + b",
         "g = f()\nassert [next(g) for _ in range(6)] == [0, 1, 1, 2, 3, 5]\nassert next(g) == 9", {},
         [True, False]),
        ("def f(n): return 10**n", ["assert f(5000) == 10**5000", "assert f(5000) == 10**5000 + 1"], {},
         [True, False]),
        ("def f(x): return x", ["assert math.isnan(f(float('nan')))",
         "assert f(float('nan')) == float('nan')", "assert math.copysign(1, f(-0.0)) == -1",
         "assert f((1, [2])) == (1, [2])", "assert f((1,)) == [1]"],
         {}, [True, False, True, True, False]),
        ("import collections\ndef f(xs):\n    d = collections.defaultdict(int)\n"
         "    for x in xs: d[x] += 1\n    return d\n"
         "def g(): return collections.defaultdict(lambda: [7], {1: 2})",
         ["assert f('aab') == {'a': 2, 'b': 1} and f('aab')['z'] == 0", "assert f('aab')['z'] == 1",
          "assert g()[1] == 2 and g()[3] == [7]", "assert g()[3] == [8]"], {}, [True, False, True, False]),
        ("def f(d): return d[5]", "import collections\nd = collections.defaultdict(list)\nassert f(d) == []\n"
         "assert 5 in d and f(collections.defaultdict(lambda: 3)) == 3\nassert f(d) == 3", {},
         [True, True, False]),
        (NUMPY + "def f(n): return np.arange(n)",
         NUMPY + "assert (f(3) == np.array([0, 1, 2])).all()\nassert np.allclose(f(2), [0, 2])\n"
         "assert f(3).sum() == 3 and f(3).dtype.kind == 'i'", {}, [True, False, True]),
        # CodeContests, AceCode, SYNTHETIC-1, DeepCoder, verl
        ("print(int(input()) + 1)",
         {"public_tests": {"input": ["1"], "output": ["2"]}, "private_tests": {"input": [], "output": []},
          "generated_tests": {"input": ["5\n", "6"], "output": ["6", "8"]}}, {}, [True, True, False]),
        ("def f(x): return x", {"test_cases": ["assert f(1) == 1", "assert f(1) == 2"]}, {}, [True, False]),
        ("def f(x): return x", {"language": "python", "test_cases": [
            {"type": "function_call", "fn_name": "f", "input": [1], "output": [1]}]}, {}, [True]),
        ("print(input())", {"test_cases": [{"type": "stdin_stdout", "input": "1", "output": "1"}]}, {},
         [True]),
        ("print(input())", {"tests": '[{"input": "1", "output": "1"}]'}, {}, [True]),
        ("def f(x): return x", {"assert_case": ["assert f(1) == 1", "assert f(1) == 2"]}, {}, [True, False]),
        ("def f(x): return x", {"assert_case": [""], "inputs": [[1]], "outputs": [[1]], "fn_name": "f"}, {},
         [True]),
    ],
)  # fmt: skip
def test_each_test_holds_where_it_does_by_hand(program, tests, fields, held):
    assert passed(program, tests, **fields) == held


WALKS = (
    "def walk(xs, see):\n    for x in xs: see(x)\n"
    "class Emitter:\n    def on(self, see): self.see = see\n    def emit(self, x): self.see(x)"
)


def test_rows_may_hold_all_that_the_grader_reads():
    """Objects and not texts of them."""
    known = {"input", "inputs", *unit_tests.HOLDERS, *unit_tests._PARTS}
    assert known == row_layouts._FIELDS_OF_TESTS


EQUAL_TO_ALL = (
    "class E:\n    def __init__(self, *args): pass\n    def __eq__(self, other): return True\n"
    "    __lt__ = __gt__ = __contains__ = __eq__\n    def __sub__(self, other): return 0.0\n"
    "    def __len__(self): return 3\n    def startswith(self, x): return True\n"
    "def f(x): return E()\ndef make(x): return E()\nPair = E"
)


@pytest.mark.parametrize(
    ("program", "tests", "why"),
    [
        (WALKS, "seen = []\ndef see(x): seen.append(x)\nassert walk([1, 2], see) is None and seen == [1, 2]",
         "a function of theirs that changes 'seen'"),
        (WALKS, "n = 0\ndef see(x):\n    global n\n    n += x\nassert walk([1, 2], see) is None and n == 3",
         "changes 'n'"),
        (WALKS, "def test_a():\n    s = set()\n    assert not walk([1], lambda x: s.add(x)) and s == {1}",
         "changes 's'"),
        (WALKS, "seen = {}\ne = Emitter()\ne.on(lambda x: seen.update({x: 1}))\n"
         "assert not e.emit(3) and seen == {3: 1}", "changes 'seen'"),
        (EQUAL_TO_ALL, ["assert abs(f(2) - 1.41) < 0.01"], "use an object of the program's type E"),
        (EQUAL_TO_ALL, ["assert f(2) < 3"], "use an object of the program's type E"),
        (EQUAL_TO_ALL, ["assert len(f(2)) == 3"], "use an object of the program's type E"),
        (EQUAL_TO_ALL, ["assert f(2).startswith('a')"], "use an object of the program's type method"),
        (EQUAL_TO_ALL, ["assert f(2) == make(3)"], "compare an object of E"),
        (EQUAL_TO_ALL, ["assert f(2) != make(3)"], "compare an object of E"),
        (EQUAL_TO_ALL, "p = Pair(1, 2)\nassert f(1) == p", "compare an object of E"),
        ("import uuid\ndef f(): return uuid.UUID(int=3)", "import uuid\nassert f() == uuid.UUID(int=3)",
         "compare an object of UUID"),
        ("class MyError(Exception): pass\ndef f(): raise MyError",
         "from solution import f, MyError\ndef test():\n    try:\n        f()\n        assert 0\n"
         "    except MyError: pass",
         "catching classes"),
        ("def f(): yield from range(5000)", ["assert sum(f()) == 12497500"], "more than 1000 items"),
        (ADDS, "import no_such_module\nassert add(1, 2) == no_such_module.three", "No module named"),
        (ADDS, ["assert add(re.compile('a'), 1) == 3"], "object of Pattern"),
        (ADDS, "for n in itertools.count():\n    assert add(n, 1) == n + 1", "more than 20000 calls"),
        ("def f(x): return x + 1", "x = 0\nfor _ in range(40): x = f(x)\nassert x == 40", "16 rounds"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_a_failure_with_its_reason(program, tests, why):
    """Never wrong in silence, and never right."""
    found = passed(program, tests)
    assert isinstance(found, str) and why in found


def test_a_failure_of_the_tests_is_counted(graders):
    (verdict,) = graders.grade([sample(block(EQUAL_TO_ALL), '["assert len(f(2)) == 3"]')])
    assert not verdict.correct and verdict.score == -1.0
    assert "of the program's type E" in str(verdict.failure)


def test_no_expected_value_is_where_the_program_is():
    """The program looks through all frames around its calls, and returns 43210 if it finds that."""
    program = """import sys
def f(x, *more):
    frame, seen, wanted = sys._getframe(), [], int("4321") * 10
    while frame := frame.f_back:
        seen += [frame.f_code.co_consts, frame.f_locals, frame.f_globals]
    return wanted if str(wanted) in repr(seen) else x
"""
    check = (
        "def check(candidate):\n    wanted = 43210\n    x = 5\n    assert candidate(x) == wanted\n"
    )
    assert passed(program, check, entry_point="f") == [False]
    assert passed(program, ["assert abs(f(5) - 43210) < 1"]) == [False]
    assert passed(program, {"fn_name": "f", "inputs": [[5]], "outputs": [[43210]]}) == [False]
    loop = "for x, y in [(5, 43210)]:\n    assert f(x) == y"
    assert passed(program, loop) == [False]
    # Nor is it where a test would call a method with it.
    assert passed(program, ["assert f('a').startswith('43210')"]) == [False]
    assert passed(program, ["assert f(5, 43210) == 43210"]) == [True]


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("2.50\n", "2.5", True),
        ("0.3333333333333333", "0.333333", True),
        ("0.33333", "0.333333", False),
        ("1 2\n3 \n\n", "1 2 3", True),
        ("12", "1 2", False),
        ("3.0", "3", True),
        ("3", "3.0000000001", True),
        ("2.9999999", "3", True),
        ("1000000007", "1000000006", False),
        ("1000000007.0", "1000000006", False),
        ("1000000.5", "1000000.0", True),
        ("1e5", "100000.0", True),
        ("100000000000000000000000000000001", "100000000000000000000000000000002", False),
        ("1" * 500, "1" * 499 + "2", False),
        ("007", "7", True),
        ("-0.0", "0", True),
        ("YES", "Yes", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("1_000", "1000", False),
        ("\u0663", "3", False),
        ("1/3", "0.333333", False),
        ("", "", True),
        ("1", "", False),
    ],
)
def test_printed_output_is_compared_token_by_token(printed, expected, same):
    assert same_output(printed, expected) is same


# Kilobytes that a program reports as its value. Read as Python literals some of them took 21 s.
REPORTS = {
    "signs": "'-' * 400_000 + '1'",
    "signs, quoted": "'\"' + '-' * 400_000 + '1\"'",
    "depth": "'[' * 400_000",
    "depth of tables": "'{\"a\":' * 80_000",
    "digits": "'9' * 400_000",
    "sums, quoted": "'\"' + '1+' * 200_000 + '1j\"'",
    "many": "'[' + '[],' * 130_000 + '1]'",
    "members that collide, quoted": (
        "'\"{' + ','.join(str(n * (2**61 - 1)) for n in range(18_000)) + '}\"'"
    ),
    "keys that collide": "'{\"set\": [' + ','.join(str(n * (2**61 - 1)) for n in range(18_000)) + ']}'",
}


@pytest.mark.parametrize("name", REPORTS)
def test_a_long_report_is_read_in_less_than_a_second(name):
    program = f"import os\nos.write(2, ({REPORTS[name]}).encode() + b'\\n')\nos._exit(0)"
    used = time.process_time()
    assert passed(program, "assert f() == {1, 2}") == [False]
    assert time.process_time() - used < 1.0


def test_a_long_value_is_compared_whole():
    program = "def f(n): return list(range(n))"
    tests = json.dumps({"fn_name": "f", "inputs": [[60_000]], "outputs": [list(range(60_000))]})
    assert passed(program, tests, 4.0) == [True]


def test_a_sleeping_program_holds_its_worker_no_longer_than_one_that_computes():
    began = time.monotonic()
    for program in (
        "import time\ntime.sleep(600)",
        "import signal\nsignal.pause()",
        "input()\ninput()",
    ):
        assert passed(program, SUM, 1.0) in (None, [False, False])
    assert time.monotonic() - began < 8


def test_all_tests_of_an_answer_have_one_limit():
    """Each run sleeps less than it may."""
    tests = json.dumps({"inputs": [""] * 100, "outputs": ["1"] * 100})
    began = time.monotonic()
    assert passed("import time\ntime.sleep(0.3)\nprint(1)", tests, 0.4) is None
    assert time.monotonic() - began < 12


def test_a_program_that_waits_for_its_threads_does_not_sleep():
    program = (
        "import threading, time\n"
        "def work():\n    until = time.process_time() + 1.5\n    while time.process_time() < until: pass\n"
        "t = threading.Thread(target=work)\nt.start()\nt.join()\nprint(1)"
    )
    tests = json.dumps({"inputs": [""], "outputs": ["1"]})
    assert passed(program, tests, 3.0) == [True]


def test_of_a_list_of_asserts_all_must_hold(graders):
    truths = ["assert add(1, 2) == 3", "assert add(2, 2) == 5"]
    for asserts, right in ((truths, False), (truths[:1] * 2, True)):
        row = {"extra": {TRUTHS: asserts}}
        (verdict,) = graders.grade([sample(block(ADDS), truths[0], **row)])
        assert verdict.correct is right


def test_part_marks(graders):
    (verdict,) = graders.grade([sample(block("def add(a, b):\n    return 3"), ADD, source="parts")])
    assert not verdict.correct and verdict.score == 0.0


def test_the_last_block_is_the_program():
    assert program_of("```py\na\n```\nor\n```\nb\n```") == "b\n"
    assert program_of("print(1)") is None


@pytest.mark.parametrize(
    "tests",
    [
        "",
        "[]",
        "{}",
        '{"inputs": [1], "outputs": []}',
        '["import os"]',
        "{",
    ],
)
def test_tests_that_cannot_be_read_are_a_fault(graders, tests):
    assert graders.validate(GradingTask(tests))
