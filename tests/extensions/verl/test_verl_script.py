"""Shell scripts of many styles: verl's settings are those that bash passes, and the rest is named."""

import json
import os
import pathlib
import re
import shlex
import textwrap

import pytest

from jaxrl.errors import UserError
from jaxrl_verl import verl_script
from jaxrl_verl.verl_files import read_verl
from jaxrl_verl.verl_script import run_script

CONFINED = not verl_script._fault_of_bubblewrap()
only_confined = pytest.mark.skipif(not CONFINED, reason="bubblewrap does not work here")
MAIN = "python3 -m verl.trainer.main_ppo"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("MODEL", "DATA", "NNODES", "RANK", "SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def read(text, *arguments, call=0, name="run.sh"):
    with open(name, "w") as file:
        file.write(textwrap.dedent(text))
    return read_verl(name, arguments, call=call, confined=CONFINED)


def cases(name: str) -> list:
    """(what it shows, script, line behind it, lines behind that) of each case in a file."""
    text = pathlib.Path(__file__).with_name(name).read_text()
    found = []
    for case in text.removeprefix("=== ").split("\n=== "):
        title, script, behind = re.fullmatch(r"(.*?)\n(.*)\n--- (.*)", case, re.DOTALL).groups()
        line, _, rest = behind.partition("\n")
        found.append(pytest.param(script, line, rest, id=title))
    return found


# Python is run, and folders are made, in the sandbox alone.
NEED_SANDBOX = ("Python that stands in the script", "a job of Slurm that submits itself")


@pytest.mark.parametrize(("text", "arguments", "settings"), cases("verl_idioms.txt"))
def test_settings_are_those_that_bash_passes(text, arguments, settings, request):
    if not CONFINED and request.node.callspec.id in NEED_SANDBOX:
        pytest.skip("bubblewrap does not work here")
    expected = json.loads(settings.replace("$HOME", os.environ.get("HOME", "")))
    found = read(text, *shlex.split(arguments)).settings
    assert {name: found.get(name, "absent") for name in expected} == expected


@pytest.mark.parametrize(("text", "said", "rest"), cases("verl_named.txt"))
def test_what_is_not_imported_is_named(text, said, rest):
    assert not rest
    file = read(text)
    unresolved = [f"{name} = {value}" for name, value in file.unresolved.items()]
    lines = "\n".join([*file.remarks, *unresolved])
    assert re.search(said, lines), lines
    assert not file.unresolved.keys() & file.settings.keys()


@only_confined
def test_files_that_are_not_here_are_named():
    file = read(
        f"set -e\nsource env.sh\n. $HOME/x/y.sh\ncd /nowhere\n{MAIN} data.seed=1 data.p=$PWD"
    )
    assert file.settings == {"data.seed": 1, "data.p": "/nowhere"}
    assert [r for r in file.remarks if "not here" in r and "env.sh" in r and "x/y.sh" in r]


@only_confined
def test_a_script_that_needs_files_goes_on_as_if_they_were_here():
    text = f"""
    MODEL=/models/m
    if [[ ! -f "$MODEL/config.json" || ! -d "/data/x" ]]; then echo "no model" >&2; exit 2; fi
    {MAIN} actor_rollout_ref.model.path=$MODEL
    """
    file = read(text)
    assert file.settings == {"actor_rollout_ref.model.path": "/models/m"}
    assert [r for r in file.remarks if "looks for files" in r and "/models/m/config.json" in r]


def test_files_that_are_here_are_read(folder):
    (folder / "lib").mkdir()
    (folder / "lib" / "common.sh").write_text("BATCH=128\nrun() { bash inner.sh data.seed=1; }\n")
    (folder / "inner.sh").write_text(f'{MAIN} data.train_batch_size=$BATCH "$@"\n')
    (folder / "conf").mkdir()
    (folder / "conf" / "mine.yaml").write_text("defaults: [ppo_trainer]\ndata: {seed: 5, a: 1}\n")
    text = 'cd "$(dirname "${BASH_SOURCE[0]}")"\nsource lib/common.sh\nexport BATCH\nrun\n'
    assert read(text).settings == {"data.seed": 1, "data.train_batch_size": 128}
    file = read(f"{MAIN} --config-path=conf --config-name mine data.seed=6")
    assert file.settings == {"data.seed": 6, "data.a": 1}


def test_megatron_is_seen_by_its_engine_or_config():
    name = "actor_rollout_ref.actor.strategy"
    for words in ("model_engine=megatron", "--config-name=ppo_megatron_trainer.yaml"):
        assert read(f"{MAIN} {words} data.seed=1").settings[name] == "megatron"


def test_one_of_several_starts_is_chosen():
    text = f"for lr in 1e-6 2e-6; do {MAIN} data.seed=1 critic.optim.lr=$lr; done\n"
    with pytest.raises(UserError, match=r"2 times; choose one by --call: 1 .*lr=1e-6; 2 .*lr=2e-6"):
        read(text)
    assert read(text, call=2).settings == {"data.seed": 1, "critic.optim.lr": 2e-6}
    with pytest.raises(UserError, match="--call 3"):
        read(text, call=3)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("verl.trainer.sft_trainer", "supervised fine-tuning"),
        ("verl.trainer.fsdp_sft_trainer", "supervised fine-tuning"),
        ("verl.trainer.main_generation", "generation: `jaxrl evaluate`"),
        ("verl.trainer.main_generation_server", "generation: `jaxrl evaluate`"),
        ("verl.trainer.main_eval", "evaluation"),
        ("recipe.gkd.main_gkd", "distillation"),
        ("recipe.on_policy_distill.main_distill", "distillation"),
        ("recipe.spin.main_spin", "another algorithm"),
        ("recipe/sppo/main_sppo.py", "another algorithm"),
    ],
)
def test_other_programs_of_verl_are_refused_by_name(module, said):
    start = "python3 " + (module if module.endswith(".py") else f"-m {module}")
    with pytest.raises(UserError, match=f"starts {module}, which is {said}"):
        read(f"{start} data.train_batch_size=8 trainer.nnodes=1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        # Arguments are missing, and what would be started is no PPO.
        (
            'if [ $# -lt 2 ]; then echo "Usage: run.sh N PATH"; exit 1; fi\n'
            "torchrun --nproc_per_node=$1 -m verl.trainer.sft_trainer data.train_files=$2\n",
            r"run.sh starts verl.trainer.sft_trainer, which is supervised fine-tuning: set data and sft",
        ),
        # The script's own variables have not been set when it ends, and are nobody's business.
        (
            f"set -xeu\nROOT=$HDFS_ROOT/x\nfor i in 1 2; do echo $i; done\n"
            f"start=${{START:-{MAIN}}}\nbatch=8\n"
            "$start data.train_batch_size=$batch data.train_files=$ROOT\n",
            r"run.sh ended with status 1: .*HDFS_ROOT: unbound variable; it starts verl.trainer.main_ppo if "
            r"somebody sets \$HDFS_ROOT: give variables before the command, arguments after FILE",
        ),
        (
            f"m=${{MODEL_DIR:?set MODEL_DIR}}\n{MAIN} actor_rollout_ref.model.path=$m\n",
            r"MODEL_DIR: set MODEL_DIR; it starts verl.trainer.main_ppo if somebody sets \$MODEL_DIR: give",
        ),
        (
            'set -x\necho "This example has moved to" >&2\necho "https://x.y/z" >&2\nexit 1\n',
            r"starts no program with settings of verl, and ended with status 1: https://x.y/z; name a YAML",
        ),
        (
            'echo "This example has moved to" >&2\necho "https://x.y/z" >&2\nexit 1\n',
            r"ended with status 1: This example has moved to https://x.y/z; name a YAML",
        ),
    ],
)
def test_a_script_that_ends_before_it_starts_verl_says_what_is_missing(text, said):
    with pytest.raises(UserError, match=said):
        read(text)


# The sandbox


@only_confined
def test_a_script_changes_nothing_outside(folder, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "kept").write_text("kept")
    (folder / "kept").write_text("kept")
    text = f"rm -rf {outside}/* kept; echo gone > {outside}/kept; echo gone > kept; cat {outside}/kept\n"
    with pytest.raises(UserError):
        read(text + f"/bin/cat < {outside}/kept || /bin/rm {outside}/kept\n")
    assert (outside / "kept").read_text() == (folder / "kept").read_text() == "kept"


@only_confined
def test_a_script_cannot_read_home_or_reach_the_network(tmp_path_factory):
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text("secret")
    text = f"s=$(cat {secret}); exec 5<> /dev/tcp/127.0.0.1/9 && s=network\n{MAIN} data.seed=1 data.s=x$s"
    assert read(text).settings == {"data.seed": 1, "data.s": "x"}


def test_what_a_script_writes_in_place_of_records_is_no_record(tmp_path_factory):
    secret = tmp_path_factory.mktemp("home") / "secret"
    secret.write_text("a\0b\0c\0python3\0-m\0verl.trainer.main_ppo\0data.seed=9\0")
    text = f"""
    cd "$JAXRL_FOLDER/calls"
    python3 -c 'import os; os.symlink("{secret}", "a"); os.mkfifo("b")'
    echo x > c
    {MAIN} data.seed=1
    """
    assert read(text).settings == {"data.seed": 1}


def test_what_would_pass_the_recorders_by_is_refused():
    for way in ("builtin command -p", "unset -f command; builtin command -p"):
        with pytest.raises(UserError, match="starts programs past the recorders"):
            read(f"{way} {MAIN} data.seed=1")


def test_a_script_that_does_not_end_is_ended(monkeypatch):
    monkeypatch.setattr(verl_script, "SECONDS", 1)
    with pytest.raises(UserError, match="did not end within 1 seconds"):
        read("f() { f & f & }; f; while :; do :; done")


def test_without_a_sandbox_a_script_runs_only_if_asked_for(monkeypatch, folder):
    monkeypatch.setattr(verl_script, "_fault_of_bubblewrap", lambda: "bwrap is not installed")
    (folder / "run.sh").write_text(
        f'touch made; python3 -c \'open("made", "w")\'; {MAIN} data.seed=1'
    )
    with pytest.raises(UserError, match=r"bwrap is not installed.*add --run") as error:
        read_verl("run.sh")
    assert "\n" not in str(error.value)
    assert read_verl("run.sh", confined=False).settings == {"data.seed": 1}
    assert not (folder / "made").exists()  # touch and python3 are recorded


def test_calls_are_told_with_their_folders(folder):
    (folder / "run.sh").write_text("mkdir -p a; cd a; x=$(curl -s y); wget z")
    calls = run_script("run.sh", confined=CONFINED).calls
    assert [(call.words, call.folder) for call in calls] == [
        (["curl", "-s", "y"], f"{folder}/a"),
        (["wget", "z"], f"{folder}/a"),
    ]
    assert [call.output for call in calls] == ["OUTPUT_OF_curl__s_y", ""]
