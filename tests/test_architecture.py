"""The arrows of the house point down: launch, configs -> cli -> commands -> trainer -> ... -> types, errors.

`jaxrl/` is the core. Packages of `extensions/` stand on it; the core reaches them through the table of
`jaxrl/extensions.py` alone.

Imports are read from the source with `ast`; those for the type checker alone count like all others.
"""

import ast
import functools
import graphlib
import importlib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest
from weights import closure, total

from jaxrl import extensions
from jaxrl.config.config_tree import leaf_types
from jaxrl.config.schema import Config
from jaxrl.errors import UserError

ROOT = pathlib.Path(__file__).parents[1]

# From the ground up. Rooms on one line do not import each other.
LINES = (
    ("types", "errors"),
    ("user_code", "process_pool", "checks", "files", "flags", "quantized", "extensions", "private"),
    ("hub", "function_identity"),
    ("models", "mesh", "algos"),
    ("rollout", "rewards", "data"),
    ("roles", "jetstream"),
    ("dataflows",),
    ("tracking",),
    ("config",),
    ("trainer",),
    ("commands",),
    ("api",),
    ("cli",),
    ("launch", "configs", "__main__"),
)
LINE_OF = {room: number for number, rooms in enumerate(LINES) for room in rooms}

# Packages of extensions/, with those of extensions/ that each stands on.
EXTENSIONS = {
    "jaxrl_agents": {"jaxrl_serving"},
    "jaxrl_answers": set(),
    "jaxrl_browse": {"jaxrl_report", "jaxrl_serving"},
    "jaxrl_buckets": set(),
    "jaxrl_cleaning": set(),
    "jaxrl_code": set(),
    "jaxrl_hub": set(),
    "jaxrl_planner": set(),
    "jaxrl_pods": set(),
    "jaxrl_proofs": {"jaxrl_pods"},
    "jaxrl_report": set(),
    "jaxrl_serving": set(),
    "jaxrl_smollm2": set(),
    "jaxrl_tinker": {"jaxrl_serving"},
    "jaxrl_verl": {"jaxrl_code"},
}

# Imports inside functions, each with its reason; anywhere else they mark a ring.
LATE_IMPORTS = {
    ("jaxrl/mesh/hosts.py", "pathwaysutils"): "only on Pathways",
    ("jaxrl/data/generated_problems.py", "reasoning_gym"): "extra `tasks`",
    ("extensions/jaxrl_answers/math_verify_grader.py", "math_verify"): "extra `math-verify`",
    ("extensions/jaxrl_code/reasoning_gym_grader.py", "reasoning_gym"): "extra `tasks`",
    ("extensions/jaxrl_smollm2/smollm2.py", "gguf"): "extra `gguf`",
    (
        "extensions/jaxrl_code/sandbox/native.py",
        "pyseccomp",
    ): "fails where libseccomp is not installed",
    ("extensions/jaxrl_serving/openai/logit_edits.py", "llguidance"): "extra `json`",
    ("extensions/jaxrl_serving/server.py", "jaxrl_serving.http_server"): "extra `serve`",
    ("extensions/jaxrl_serving/server.py", "jaxrl_serving.openai.endpoint"): "extra `serve`",
    ("extensions/jaxrl_browse/browse_command.py", "jaxrl_serving.http_server"): "extra `serve`",
    (
        "extensions/jaxrl_browse/browse_command.py",
        "jaxrl_browse.browse_app",
    ): "extra `serve`",
    ("jaxrl/models/kernels/grouped_matmul.py", "tokamax"): "extra `tokamax`, seconds to import",
    **{
        (
            "jaxrl/private.py",
            f"tokamax._src.ops.ragged_dot.{module}",
        ): "extra `tokamax`, seconds to import"
        for module in ("pallas_mosaic_gpu", "pallas_mosaic_gpu_common")
    },
    ("jaxrl/private.py", "jax._src.pallas.triton"): "jax 0.11 and newer",
    (
        "jaxrl/dataflows/algorithm_config.py",
        "jaxrl.dataflows.lookup",
    ): "settings are checked before the models' libraries are imported",
}

# Whoever imports what a text names, which `imports_of` cannot see.
IMPORTS_BY_NAME = {
    "jaxrl/__init__.py": "`import jaxrl` and the command line do not wait for JAX",
    "extensions/jaxrl_agents/adapters/packages.py": "packages of environments",
    "jaxrl/cli.py": "a list of all commands need not wait for JAX; test_cli.py looks them up",
    "extensions/jaxrl_code/calls.py": "modules that tests of programs name, inside a sandbox",
    "jaxrl/extensions.py": "packages that may have been removed; a test here looks all names up",
    "jaxrl/commands/training_commands.py": "a slip on the command line is told before JAX is imported",
    "jaxrl/tracking/loggers.py": "extras `wandb` and `trackio`",
    "jaxrl/user_code.py": "functions of a user's",
}

SOURCES = sorted(
    path.relative_to(ROOT)
    for folder in ("jaxrl", "extensions", "launch", "configs")
    for path in (ROOT / folder).rglob("*.py")
)


def module_name(path: pathlib.Path) -> str:
    """jaxrl/mesh/rules.py is jaxrl.mesh.rules, extensions/jaxrl_verl/__init__.py is jaxrl_verl."""
    parts = path.with_suffix("").parts
    parts = parts[1:] if parts[0] == "extensions" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def room_of(module: str) -> str | None:
    """jaxrl.mesh.rules lies in mesh, launch.train in launch, numpy and extensions nowhere."""
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


def extension_of(module: str) -> str | None:
    """jaxrl_verl.verl_files lies in jaxrl_verl, jaxrl.mesh.rules in none."""
    top = module.partition(".")[0]
    return top if top.startswith("jaxrl_") else None


def wrong_uses(importer: str, imported: set[str]) -> list[str]:
    """The imports of extensions by modules that do not stand on them."""
    here = extension_of(importer)
    allowed = EXTENSIONS[here] | {here} if here else set()
    # A recipe's functions may be written for an extension.
    if room_of(importer) == "configs":
        allowed = EXTENSIONS.keys()
    return [
        f"{importer} imports {module}"
        for module in sorted(imported)
        if (there := extension_of(module)) and there not in allowed
    ]


def test_imports_point_down():
    core = {module: path for module, path in MODULES.items() if not extension_of(module)}
    rooms = {room_of(module) for module in core}
    assert rooms <= {*LINE_OF, "jaxrl"}, "a new room needs a line in LINES"
    wrong = [wrong_arrows(module, imports_of(parse(path))) for module, path in core.items()]
    assert list(itertools.chain(*wrong)) == []


def test_the_core_imports_no_extension_and_an_extension_few_others():
    assert {extension_of(module) for module in MODULES} - {None} == EXTENSIONS.keys()
    wrong = [wrong_uses(module, imports_of(parse(path))) for module, path in MODULES.items()]
    assert list(itertools.chain(*wrong)) == []


def test_no_text_of_the_core_names_an_extension_but_the_table():
    named = {
        path.as_posix()
        for path in SOURCES
        if path.parts[0] == "jaxrl" and re.search(r"\bjaxrl_\w+[.:]", (ROOT / path).read_text())
    }
    assert named <= {"jaxrl/extensions.py", "jaxrl/api.py"}, (
        "api.py names the type of `OpenRun.serve`"
    )


@pytest.mark.parametrize("name", extensions.EXTENSIONS)
def test_what_the_table_names_is_there(name):
    assert callable(extensions.lookup(name))


@pytest.mark.parametrize("name", extensions.EXTENSIONS)
def test_a_removed_extension_is_told_in_a_line(name, monkeypatch):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "extensions" not in path])
    monkeypatch.setattr(
        sys, "meta_path", [one for one in sys.meta_path if "editable" not in one.__module__]
    )
    package = extensions.EXTENSIONS[name].partition(".")[0]
    for module in [*sys.modules]:
        if extension_of(module) == package:
            monkeypatch.delitem(sys.modules, module)
    importlib.invalidate_caches()
    with pytest.raises(UserError, match=f"needs {package}, which is not installed"):
        extensions.lookup(name)


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_the_readme_of_an_extension_lists_what_it_uses_of_the_core(extension):
    readme = (ROOT / "extensions" / extension / "README.md").read_text()
    used = {
        imported
        for module, path in MODULES.items()
        if extension_of(module) == extension
        for imported in imports_of(parse(path))
        if imported.startswith("jaxrl.")
    }
    assert set(re.findall(r"`(jaxrl\.[\w.]+)`", readme)) == used
    assert len(readme.splitlines()) <= 40


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


def test_what_a_config_names_is_found_in_one_place():
    """Everything else is given what `resolve` found, or asks the settings (`AlgorithmConfig.flow`)."""
    names = ("find_dataflow", "read_placement", "read_config", "check_params")
    users = {name: set() for name in names}
    for module, path in MODULES.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Name) and node.id in names:
                users[node.id].add(module.removeprefix("jaxrl."))
    # An evaluation has the actor alone, on all devices, whatever the config places.
    assert users == {
        "find_dataflow": {"dataflows.algorithm_config"},
        "read_placement": {"trainer.resolved", "commands.evaluate"},
        # Commands for one folder, and the shape that a config states.
        "read_config": {
            *("trainer.resolved", "config.shapes"),
            *("data.model_directory", "tracking.run_weights", "jaxrl_planner.mesh_command"),
        },
        # Those that load weights look again.
        "check_params": {
            *("trainer.findings", "commands.evaluate", "models.huggingface.weight_loading"),
        },
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
    "lines of code of jaxrl/": 30_812,
    "files of jaxrl/": 235,
    "lines of code of its largest package": 5_994,
    "lines of code that trainer/ imports, itself included": 28_278,
    "files that trainer/ imports, itself included": 203,
    "settings": 206,
    "functions per 1,000 lines of code": 89,
    "lines of code of extensions/": 22_153,
    "lines of code of jaxrl_agents": 1_893,
    "lines of code of jaxrl_answers": 2_030,
    "lines of code of jaxrl_browse": 339,
    "lines of code of jaxrl_buckets": 959,
    "lines of code of jaxrl_cleaning": 216,
    "lines of code of jaxrl_code": 1_547,
    "lines of code of jaxrl_hub": 384,
    "lines of code of jaxrl_planner": 5_359,
    "lines of code of jaxrl_pods": 922,
    "lines of code of jaxrl_proofs": 904,
    "lines of code of jaxrl_report": 754,
    "lines of code of jaxrl_serving": 2_455,
    "lines of code of jaxrl_smollm2": 215,
    "lines of code of jaxrl_tinker": 2_765,
    "lines of code of jaxrl_verl": 1_425,
    "lines of code of tests": 53_531,
}
MIN_COMMENT_PERCENT = 4.0


def code_of(folder: pathlib.Path) -> int:
    return total(list(folder.rglob("*.py"))).code


def test_the_house_keeps_its_budgets(capsys):
    core = total(list((ROOT / "jaxrl").rglob("*.py")))
    training = closure(ROOT / "jaxrl" / "trainer", ROOT / "jaxrl")
    figures = {
        "lines of code of jaxrl/": core.code,
        "files of jaxrl/": len(list((ROOT / "jaxrl").rglob("*.py"))),
        "lines of code of its largest package": max(
            code_of(path) for path in (ROOT / "jaxrl").iterdir() if (path / "__init__.py").exists()
        ),
        "lines of code that trainer/ imports, itself included": total(training).code,
        "files that trainer/ imports, itself included": len(training),
        "settings": len(leaf_types(Config)),
        "functions per 1,000 lines of code": round(1000 * core.functions / core.code),
        "lines of code of extensions/": code_of(ROOT / "extensions"),
        **{f"lines of code of {name}": code_of(ROOT / "extensions" / name) for name in EXTENSIONS},
        "lines of code of tests": code_of(ROOT / "tests"),
    }
    comments = 100 * core.comments / core.lines
    with capsys.disabled():
        print()
        for name, figure in figures.items():
            print(f"{figure:8,} of {BUDGETS[name]:8,} {name}")
        print(f"{comments:8.1f} of {MIN_COMMENT_PERCENT:8} percent of lines are comments, at least")
    assert {name for name, figure in figures.items() if figure > BUDGETS[name]} == set()
    assert comments >= MIN_COMMENT_PERCENT


def test_no_function_is_longer_than_a_hundred_lines():
    for path, node in ((p, n) for p in SOURCES for n in ast.walk(parse(p))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 100, f"split {node.name} of {path}"


def test_no_ring_among_modules():
    graph = {
        module: imports_of(parse(path)) & (MODULES.keys() - {module})
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the ring


def test_an_installed_package_has_every_file():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"jaxrl": ROOT / "jaxrl", **{name: ROOT / "extensions" / name for name in EXTENSIONS}}
    declared = {
        path
        for package, patterns in settings["package-data"].items()
        for top, *parts in [package.split(".")]
        for pattern in patterns
        for path in folders[top].joinpath(*parts).glob(pattern)
    }
    files = {path for folder in folders.values() for path in folder.rglob("*") if path.is_file()}
    others = {p for p in files if p.suffix not in (".py", ".pyc") and p.name != "README.md"}
    assert others == declared
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
        ("jaxrl.trainer.program", "from configs.dapo_tiny import get_config"),
        ("jaxrl", "from jaxrl.errors import UserError"),
        ("jaxrl.mesh.rules", "import jaxrl"),
        ("jaxrl.trainer.program", "from jaxrl import cli"),
    ],
)
def test_a_wrong_arrow_is_seen(importer, source):
    assert len(wrong_arrows(importer, imports_of(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("jaxrl.trainer.program", "from jaxrl_planner.resolve import resolved"),
        ("jaxrl.mesh.devices", "def f():\n    import jaxrl_planner.hardware.cluster"),
        ("launch.train", "from jaxrl_pods import doctor"),
        ("jaxrl_serving.server", "from jaxrl_agents.served import Served"),
    ],
)
def test_a_use_of_an_extension_is_seen(importer, source):
    assert len(wrong_uses(importer, imports_of(ast.parse(source)))) == 1


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("jaxrl.mesh.rules", "import numpy\nfrom jaxrl.errors import UserError"),
        ("jaxrl.mesh.rules", "from jaxrl.mesh import layout"),
        ("jaxrl.trainer.program", "from jaxrl import types\nimport jaxrl.algos.shaping"),
        ("launch.train", "from jaxrl import cli"),
    ],
)
def test_a_right_arrow_is_let_through(importer, source):
    assert wrong_arrows(importer, imports_of(ast.parse(source))) == []


def test_a_late_import_is_seen():
    source = "import a\nclass C:\n    def f(self):\n        def g():\n            from b import c"
    assert late_imports_of(ast.parse(source)) == {"b"}


def test_importing_everything_touches_no_device():
    # JAX takes the number of devices as long as nothing has asked for one, and refuses it afterwards.
    top = {module for module in MODULES if room_of(module) in LINES[-1]}
    imports = [f"import {module}" for module in MODULES if module not in top]
    scripts = [
        f"runpy.run_path({str(ROOT / MODULES[module])!r}, run_name='imported')"
        for module in sorted(top)
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
