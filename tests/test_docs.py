"""The documentation: every link leads somewhere, and the site builds without warnings."""

import ast
import dataclasses
import os
import pathlib
import posixpath
import re
import subprocess
import sys
import tomllib

import pytest

from jaxrl import cli
from jaxrl.config import config_tree
from jaxrl.config.schema import Config
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from tests.extras import needs_extra

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s#]*)#?([^)\s]*)\)")
CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]*`", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files(page):
    for link, anchor in LINK.findall(CODE.sub("", page.read_text())):
        if "://" in link or link.startswith("mailto:"):
            continue
        target = pathlib.Path(page.parent, link) if link else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{link}#{anchor}"


def anchors_of(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, as mkdocs makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", text) for text in kept}


@pytest.mark.parametrize("page", ["tutorial", "from_trl", "from_verl", "troubleshooting"])
def test_settings_that_a_page_names_exist(page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    if page == "from_verl":  # the first column has names of verl
        text = "\n".join(re.findall(r"^\|[^|\n]*\|(.*)$", text, re.MULTILINE))
    known = set(config_tree.leaf_types(Config))
    groups = {name.rsplit(".", depth)[0] for name in known for depth in range(1, name.count("."))}
    groups |= {field.name for field in dataclasses.fields(Config)}
    tables = {name for name, kind in config_tree.leaf_types(Config).items() if "dict" in str(kind)}
    named = set(re.findall(r"(?:`|config\.)((?:[a-z]\w*\.)+[a-z]\w*)", text))
    named = {name for name in named if name.split(".")[0] in groups and not name.endswith("_")}
    files = {name for name in named if name.endswith((".py", ".md", ".jsonl", ".html"))}
    inside = {name for name in named if any(name.startswith(f"{table}.") for table in tables)}
    assert named & known and not named - files - inside - known - groups


def test_what_is_to_be_installed_exists():
    """A name that nobody has published may be registered by anybody. jaxrl comes from a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    ours = project["dependencies"] + [requirement for extra in extras for requirement in extra]
    known = {re.match(r"[\w-]+", requirement)[0] for requirement in ours} - {"jaxrl"}
    known |= {"pathwaysutils", "uv", "xprof", "tinker", "tinker-cookbook"}
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    for folder in ("docs", "jaxrl", "configs", "launch", "benchmarks"):
        found = (ROOT / folder).rglob("*.*")
        pages += [path for path in found if path.suffix in (".py", ".md", ".sh", ".yaml", ".ipynb")]
    named = set()
    for page in pages:
        text = page.read_text()
        assert not re.search(r"\bjaxrl\[[a-z]", text), page
        # `-e '.[serve]'` begins with a dot, `{package}` with a brace.
        named |= set(re.findall(r"pip install (?:-\S+ )*['\"]?([A-Za-z][\w-]*)", text))
    assert len(named) > 8 and named <= known


# Fields of GRPOConfig in TRL 1.16.0 (`trl/trainer/grpo_config.py`).
TRL_FIELDS = """
learning_rate model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout
cast_lm_head_to_fp32 remove_unused_columns num_generations num_generations_eval
max_completion_length ds3_gather_for_generation shuffle_dataset pad_to_multiple_of
generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl
vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url vllm_server_host
vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization
vllm_max_model_length vllm_tensor_parallel_size beta num_iterations epsilon delta epsilon_high
sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation
scale_rewards loss_type mask_truncated_completions sync_ref_model ref_model_mixup_alpha
ref_model_sync_steps top_entropy_quantile entropy_coef use_adaptive_entropy entropy_coef_min
entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode
vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min off_policy_mask_threshold
use_bias_correction_kl log_completions log_multimodal num_completions_to_print
log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
""".split()  # noqa: SIM905


def test_every_field_of_trl_is_named():
    text = (ROOT / "docs" / "from_trl.md").read_text()
    table = "\n".join(re.findall(r"^\|([^|\n]*)\|", text, re.MULTILINE))
    assert len(TRL_FIELDS) == 79
    assert not set(TRL_FIELDS) - set(re.findall(r"`([a-z_0-9]+)[`=]", table))


def test_the_step_on_the_first_page_is_the_one_that_runs():
    """The dataflow of DAPO, but for the numbers in the margin."""
    (shown,) = re.findall(
        r"```python\n(@dataflow.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    shown = re.sub(r" +# (\(\d\) ?)+$", "", shown, flags=re.MULTILINE)
    assert (ROOT / "jaxrl/dataflows/dapo.py").read_text().endswith(shown)


def test_errors_that_the_page_of_symptoms_quotes_are_raised():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    sources = [path.read_text() for path in (ROOT / "jaxrl").rglob("*.py")]
    for quoted in (
        "this run lacks",
        "unknown setting",
        "compiled programs are not kept",
        "is in use by",
        "no intact checkpoint is left",
        "groups with",
        "training stops here",
    ):
        assert f"`{quoted}" in page, quoted
        assert any(quoted in source for source in sources), quoted


@pytest.mark.slow
@needs_extra("docs", "mkdocs")
def test_the_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    settings = (tmp_path / "reference" / "settings.html").read_text()
    for name in config_tree.leaf_types(Config):
        assert f"<code>{name}</code>" in settings, name
    commands = (tmp_path / "reference" / "commands.html").read_text()
    for name in cli.COMMANDS:
        assert f"usage: jaxrl {name}" in commands, name
    assert "jaxrl.rewards.Responses" in (tmp_path / "reference" / "names.html").read_text()
    broken = []
    for page in tmp_path.rglob("*.html"):
        for link in re.findall(r'(?:href|src)="([^"#?]+)[^"]*"', page.read_text()):
            if "://" in link or link.startswith(("mailto:", "data:", "/")):
                continue
            if not pathlib.Path(posixpath.normpath(page.parent / link)).exists():
                broken.append(f"{page.relative_to(tmp_path)}: {link}")
    assert not broken
    # Nothing generated stays in the sources.
    assert not (ROOT / "docs" / "reference").exists()


def test_layouts_that_pages_name_are_layouts():
    text = "".join((ROOT / "docs" / f"{page}.md").read_text() for page in ("mesh", "from_verl"))
    rows = re.findall(r"\| `(\d+-\d+-\d+)`(?:, `sharding.*?`)? \| (.*?) \| (.*?) \|", text)
    assert len(rows) > 10
    for train, *others in rows:
        (generate,) = (cell.strip("`") for cell in others if "-" in cell)
        (fsdp,) = (int(cell) for cell in others if cell.isdecimal())
        layout = ParallelLayout.from_config(LayoutConfig(train=train, generate=generate, fsdp=fsdp))
        assert layout.d % fsdp == 0


def defined_names() -> set[str]:
    """Classes, functions, arguments, variables and texts of the package, such as keys of its tables."""
    names: set[str] = set()
    for path in [*(ROOT / "jaxrl").rglob("*.py"), *(ROOT / "configs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def missing_names(page: str) -> list[str]:
    """Names of files, settings, classes and functions in a page that do not exist."""
    folders = [ROOT, ROOT / "jaxrl", ROOT / "extensions"]
    packages = [ROOT / "jaxrl", ROOT / "extensions"]
    below = {path.name for root in packages for path in root.rglob("*") if path.is_dir()}
    defined, missing = defined_names(), []
    quoted = re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    )
    for text in quoted:
        name = re.split(r"[ =(\[]", text)[0]
        is_file = "/" in name or name.endswith((".py", ".md", ".yaml", ".toml"))
        if ":" in text or name in ("python", "make", "rm") or not re.fullmatch(r"[\w./]+", name):
            continue
        there = any((folder / name).exists() for folder in folders)
        there |= is_file and any(any(root.rglob(name.strip("/"))) for root in packages)
        if not (
            there
            or config_tree.setting_type(Config, name) is not None
            or name in defined
            or (not is_file and all(part in defined or part in below for part in name.split(".")))
        ):
            missing.append(text)
    # The drawing of the layers.
    for line in re.findall(r"^ {6,}\S.*", page, re.MULTILINE):
        for name in re.findall(r"(?<![\w/])([a-z_]+)/", line):
            if name not in below and not (ROOT / name).is_dir():
                missing.append(f"{name}/")
    return missing


def test_names_of_the_architecture_exist():
    page = (ROOT / "docs/architecture.md").read_text()
    assert not missing_names(page)
    # A name that is gone is found.
    gone = "`CurriculumBeside` `dataflows/gone.py` `rollout.vanished` `RunContext.vanished`\n      gone/  a\n"
    assert len(missing_names(gone)) == 5


def test_functions_that_pages_name_with_their_modules_exist():
    """`mesh.rules.per_device`; verl's names look alike."""
    for page in (page for page in PAGES if page.stem != "from_verl"):
        for package, name, function in re.findall(r"`([a-z]+)\.(\w+)\.(\w+)`", page.read_text()):
            is_setting = config_tree.setting_type(Config, f"{package}.{name}.{function}")
            if (folder := ROOT / "jaxrl" / package).is_dir() and not is_setting:
                source = (folder / f"{name}.py").read_text()
                assert re.search(rf"^(def|class) {function}\b", source, re.MULTILINE), (page, name)
