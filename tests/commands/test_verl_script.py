"""Shell scripts of many styles: verl's settings are those that bash passes, and the rest is named."""

import os
import re
import textwrap

import pytest

from jaxrl.commands import verl_script
from jaxrl.commands.verl_files import read_verl
from jaxrl.commands.verl_script import run_script
from jaxrl.errors import UserError

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


# (what it shows, script, arguments, settings)
IDIOMS = [
    (
        "a program past PATH",
        f"command -p {MAIN} data.seed=4",
        (),
        {"data.seed": 4},
    ),
    (
        "the branch of a case that is taken",
        f"""
        SIZE=${{SIZE:-7b}}
        case $SIZE in
            1b) batch=16 len=32768 ;;
            7b | 8b) batch=1024; len=2048 ;;
            *) echo "which?" >&2; exit 1 ;;
        esac
        {MAIN} data.train_batch_size=$batch data.max_response_length=$len
        """,
        (),
        {"data.train_batch_size": 1024, "data.max_response_length": 2048},
    ),
    (
        "if, elif and else",
        f"""
        n=4
        if [[ $n -gt 8 ]]; then tp=8
        elif (( n > 2 )); then tp=2
        else tp=1; fi
        {MAIN} actor_rollout_ref.rollout.tensor_model_parallel_size=$tp
        """,
        (),
        {"actor_rollout_ref.rollout.tensor_model_parallel_size": 2},
    ),
    (
        "short circuits",
        f"""
        debug=0
        [ "$debug" = 1 ] && steps=2 || steps=200
        test -n "" && steps=3
        {MAIN} trainer.total_training_steps=$steps
        """,
        (),
        {"trainer.total_training_steps": 200},
    ),
    (
        "arrays that branches add to",
        f"""
        set -xeuo pipefail
        ARGS=(data.seed=1
            # a comment in an array
            "data.train_files=['/a/x.parquet', '/b y.parquet']")
        use_kl=true
        if $use_kl; then ARGS+=(actor_rollout_ref.actor.use_kl_loss=True); fi
        NONE=()
        {MAIN} "${{ARGS[@]}}" "${{NONE[@]}}" "$@"
        """,
        ("data.seed=7", "+trainer.note=a b"),
        {
            "data.seed": 7,
            "data.train_files": ["/a/x.parquet", "/b y.parquet"],
            "actor_rollout_ref.actor.use_kl_loss": True,
            "trainer.note": "a b",
        },
    ),
    (
        "functions, locals and positional arguments",
        f"""
        train() {{
            local lr=$1 n=${{2:-8}}
            shift 2
            {MAIN} actor_rollout_ref.actor.optim.lr=$lr actor_rollout_ref.rollout.n=$n "$@"
        }}
        main() {{ train "${{1}}" 16 data.seed=3; }}
        main "$@"
        """,
        ("3e-6",),
        {
            "actor_rollout_ref.actor.optim.lr": 3e-6,
            "actor_rollout_ref.rollout.n": 16,
            "data.seed": 3,
        },
    ),
    (
        "shift and ${1:-default}",
        f"""
        ENGINE=${{1:-vllm}}
        shift $(( $# > 0 ? 1 : 0 ))
        {MAIN} actor_rollout_ref.rollout.name=$ENGINE $@
        """,
        (),
        {"actor_rollout_ref.rollout.name": "vllm"},
    ),
    (
        "getopts and a while over arguments",
        f"""
        while [[ $# -gt 0 ]]; do
            case "$1" in
                --lr) lr="$2"; shift 2 ;;
                --seed=*) seed="${{1#*=}}"; shift ;;
                *) rest+=("$1"); shift ;;
            esac
        done
        {MAIN} critic.optim.lr=$lr data.seed=$seed "${{rest[@]}}"
        """,
        ("--lr", "1e-5", "--seed=9", "trainer.nnodes=2"),
        {"critic.optim.lr": 1e-5, "data.seed": 9, "trainer.nnodes": 2},
    ),
    (
        "expansions of parameters",
        f"""
        path=/models/Qwen2.5-7B.tar
        name=${{path##*/}}; name=${{name%.tar}}; short=${{name/Qwen/q}}; low=${{short,,}}
        {MAIN} trainer.experiment_name=$low trainer.project_name=${{NOT_SET_HERE:-p}}_${{#name}} \\
            data.seed=${{name:4:1}} trainer.nnodes=${{NODES_X:=2}}
        """,
        (),
        {
            "trainer.experiment_name": "q2.5-7b",
            "trainer.project_name": "p_10",
            "data.seed": 2,
            "trainer.nnodes": 2,
        },
    ),
    (
        "arithmetic of bash",
        f"""
        a=$((1024 * 2)) b=$(( 2 ** 10 )) c=$((a > b ? a : b)) d=$[3*3]
        let e=a/3
        ((f = a % 3, f++))
        {MAIN} data.a=$a data.b=$b data.c=$c data.d=$d data.e=$e data.f=$f data.g=$(expr 3 + 4)
        """,
        (),
        {
            "data.a": 2048,
            "data.b": 1024,
            "data.c": 2048,
            "data.d": 9,
            "data.e": 682,
            "data.f": 3,
            "data.g": 7,
        },
    ),
    (
        "harmless programs are run",
        f"""
        n=$(echo "4 8" | awk '{{print $2}}'); base=$(basename /x/y.json .json)
        lens=$(seq -s, 1 3); up=$(printf '%s' abc | tr a-z A-Z); s=$(sed 's/b/x/' <<< abc)
        {MAIN} data.n=$n data.base=$base data.lens=[$lens] data.up=$up data.s=$s
        """,
        (),
        {"data.n": 8, "data.base": "y", "data.lens": [1, 2, 3], "data.up": "ABC", "data.s": "axc"},
    ),
    (
        "a heredoc that becomes a file, and one that is read",
        f"""
        cat > flags.txt <<EOF
        data.seed=5
        trainer.nnodes=3
        EOF
        read -r -d '' MORE <<'EOF' || true
        data.shuffle=False data.note=$x
        EOF
        {MAIN} $(cat flags.txt) $MORE
        """.replace("        EOF", "EOF").replace("        data.s", "data.s"),
        (),
        {"data.seed": 5, "trainer.nnodes": 3, "data.shuffle": False},
    ),
    (
        "a command that is a text",
        f"""
        CMD="{MAIN} data.train_batch_size=64"
        CMD="$CMD data.seed=2"
        echo $CMD
        eval "$CMD trainer.experiment_name='a b'"
        """,
        (),
        {"data.train_batch_size": 64, "data.seed": 2, "trainer.experiment_name": "a b"},
    ),
    (
        "an interpreter by its path, with variables before it",
        """
        PY=/opt/conda/envs/verl/bin/python
        CUDA_VISIBLE_DEVICES=0,1 X="a b" $PY -u -m verl.trainer.main_ppo data.seed=4 > logs.txt 2>&1 &
        wait $!
        """,
        (),
        {"data.seed": 4},
    ),
    (
        "exec, and a log",
        f"""
        exec > >(tee -a run.log) 2>&1
        mkdir -p out/logs
        exec {MAIN} data.seed=4
        """,
        (),
        {"data.seed": 4},
    ),
    (
        "launchers",
        """
        ray stop --force; ray start --head
        ray job submit --address=http://x:8265 --runtime-env-json='{"a": "b=c"}' --no-wait -- \\
            uv run --with x python3 -m recipe.dapo.main_dapo data.seed=6 2>&1 | tee log
        """,
        (),
        {"data.seed": 6},
    ),
    (
        "commands inside of a text",
        """
        srun --overlap -w "$(hostname)" bash -c "cd /tmp && python3 -u -m verl.trainer.main_ppo data.seed=6"
        """,
        (),
        {"data.seed": 6},
    ),
    (
        "a job of Slurm that submits itself",
        f"""#!/bin/bash
        if [ -z "$SLURM_JOB_ID" ]; then sbatch "$0" "$@"; exit; fi
        srun {MAIN} data.seed=6 "$@" > /logs/not/here.txt
        """,
        ("data.a=1",),
        {"data.seed": 6, "data.a": 1},
    ),
    (
        "a script for Slurm in a heredoc",
        f"""
        sbatch --nodes 2 <<EOF
        #!/bin/bash
        {MAIN} data.seed=6
        EOF
        """.replace("        EOF", "EOF"),
        (),
        {"data.seed": 6},
    ),
    (
        "docker and ssh",
        """
        ssh node1 "cd /w; python -m verl.trainer.main_ppo data.seed=8 trainer.nnodes=2"
        """,
        (),
        {"data.seed": 8, "trainer.nnodes": 2},
    ),
    (
        "torchrun of a file",
        "torchrun --nproc_per_node 8 verl/trainer/main_ppo.py data.seed=8 --local_rank 0\n",
        (),
        {"data.seed": 8},
    ),
    (
        "an environment that is prepared first",
        f"""
        source ~/.bashrc
        eval "$(conda shell.bash hook)"
        conda activate verl
        module load cuda/12.4
        . venv/bin/activate
        pip install -e . && export PYTHONPATH=$PYTHONPATH:.
        ulimit -n 65535
        trap 'ray stop' EXIT
        {MAIN} data.seed=8
        """,
        (),
        {"data.seed": 8},
    ),
    (
        "hydra: +, ++, later values, quotes, lists, dicts",
        f"""
        {MAIN} +data.a=1 ++data.b=2 data.b=3 'data.c="x y"' data.d="['a','b']" data.e='["a", "b"]' \\
            data.f=[] '+data.g={{n:4,t:0.6,s:{{k:v}}}}' data.h=null data.i=True data.j=1e-6 data.k=.5 \\
            data.l=017 data.m=2025-01-02 data.n=yes data.o=12:30 data.p=1_000 data.q= data.r=a=b \\
            "data.s='\\$1'" data.t=hdfs://x/y data.u=[hdfs://x/y,z] data.v=0x10 data.w=-1
        """,
        (),
        {
            "data.a": 1,
            "data.b": 3,
            "data.c": "x y",
            "data.d": ["a", "b"],
            "data.e": ["a", "b"],
            "data.f": [],
            "data.g.n": 4,
            "data.g.t": 0.6,
            "data.g.s.k": "v",
            "data.h": None,
            "data.i": True,
            "data.j": 1e-6,
            "data.k": 0.5,
            "data.l": "017",
            "data.m": "2025-01-02",
            "data.n": "yes",
            "data.o": "12:30",
            "data.p": 1000,
            "data.r": "a=b",
            "data.t": "hdfs://x/y",
            "data.u": ["hdfs://x/y", "z"],
            "data.v": "0x10",
            "data.w": -1,
        },
    ),
    (
        "interpolations of hydra",
        f"""
        {MAIN} data.max_response_length=8 'actor_rollout_ref.rollout.x=${{data.max_response_length}}' \\
            data.files='[${{data.a}},b]' data.a=/x 'data.e=${{oc.env:HOME}}'
        """,
        (),
        {
            "actor_rollout_ref.rollout.x": 8,
            "data.files": ["/x", "b"],
            "data.e": os.environ.get("HOME", ""),
        },
    ),
    (
        "retries and loops that start the same",
        f"""
        for i in 1 2 3; do
            {MAIN} data.seed=1 && break
            sleep 60
        done
        until ray status; do sleep 5; done
        """,
        (),
        {"data.seed": 1},
    ),
    (
        "associative arrays, indirection and printf -v",
        f"""
        declare -A SIZES=([small]=64 [large]=512)
        kind=large; ref=kind
        printf -v name '%s_%03d' "$kind" 7
        {MAIN} data.train_batch_size=${{SIZES[$kind]}} trainer.experiment_name=$name data.x=${{!ref}}
        """,
        (),
        {"data.train_batch_size": 512, "trainer.experiment_name": "large_007", "data.x": "large"},
    ),
    (
        "matches, files of variables, quotes of printf",
        f"""
        echo 'SEED=7' > vars.env
        export $(grep -v '^#' vars.env | xargs)
        size=7b; if [[ $size =~ ^([0-9]+)b$ ]]; then echo $HOME/x; n=${{BASH_REMATCH[1]}}; fi
        for f in a b; do files+="'/d/$f.parquet',"; done
        A=(data.n=$n 'data.x=a b' "data.files=[${{files%,}}]")
        trap 'kill $(jobs -p)' EXIT
        eval {MAIN} data.seed=$SEED $(printf '%q ' "${{A[@]}}")
        """,
        (),
        {
            "data.seed": 7,
            "data.n": 7,
            "data.x": "a b",
            "data.files": ["/d/a.parquet", "/d/b.parquet"],
        },
    ),
    (
        "Python that stands in the script",
        f"""
        n=$(python3 -c 'print(4 * 8)')
        m=$(uv run python - <<EOF
        print($n + 1)
        EOF
        )
        {MAIN} data.n=$n data.m=$m
        """.replace("        EOF", "EOF").replace("        print(", "print("),
        (),
        {"data.n": 32, "data.m": 33},
    ),
    (
        "a look for other accelerators, and for what verl needs",
        f"""
        set -e
        DEVICE=${{DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}}
        case $DEVICE in
            gpu) batch=1024; len=2048 ;;
            npu) batch=16; len=32768 ;;
            *) exit 1 ;;
        esac
        python -c "import vllm" || exit 1
        if ! command -v nvidia-smi > /dev/null; then exit 1; fi
        {MAIN} data.train_batch_size=$batch data.max_response_length=$len
        """,
        (),
        {"data.train_batch_size": 1024, "data.max_response_length": 2048},
    ),
    (
        "subshells, groups and select by hostname",
        f"""
        export SEED=3
        ( cd / ; SEED=4; {MAIN} data.seed=$SEED trainer.where=$PWD )
        """,
        (),
        {"data.seed": 4, "trainer.where": "/"},
    ),
]


# Python is run, and folders are made, in the sandbox alone.
NEED_SANDBOX = ("Python that stands in the script", "a job of Slurm that submits itself")


@pytest.mark.parametrize(
    ("text", "arguments", "expected"), [row[1:] for row in IDIOMS], ids=[row[0] for row in IDIOMS]
)
def test_settings_are_those_that_bash_passes(text, arguments, expected, request):
    if not CONFINED and request.node.callspec.id in NEED_SANDBOX:
        pytest.skip("bubblewrap does not work here")
    settings = read(text, *arguments).settings
    assert {name: settings.get(name, "absent") for name in expected} == expected


# (what it shows, script, what must be said)
NAMED = [
    (
        "a variable that nobody sets",
        f"{MAIN} data.train_files=$DATA/x data.seed=1",
        r"data.train_files = \$DATA/x",
    ),
    ("an argument that is missing", f"m=$1\n{MAIN} data.seed=1 data.path=$m", r"data.path = \$1"),
    (
        "a variable that decides",
        f"if [ $RANK = 0 ]; then b=1; else b=2; fi\n{MAIN} data.train_batch_size=$b",
        r"empty: \$RANK",
    ),
    ("a variable in arithmetic", f"{MAIN} trainer.nnodes=$((NNODES * 2))", r"empty: \$NNODES"),
    (
        "the output of a program",
        f"{MAIN} trainer.n_gpus_per_node=$(nvidia-smi -L)",
        "trainer.n_gpus_per_node = OUTPUT_OF_nvidia_smi__L",
    ),
    (
        "a count of such output",
        f"n=$(nvidia-smi -L | wc -l)\n{MAIN} trainer.n_gpus_per_node=$n",
        "values made of it are wrong: nvidia-smi -L",
    ),
    (
        "an empty value",
        f"NODES=${{NODES:-}}\n{MAIN} data.seed=1 trainer.nnodes=$NODES",
        r"trainer.nnodes = \(empty\)",
    ),
    (
        "what is started besides",
        f"python3 prepare.py --out x\n{MAIN} data.seed=1",
        "python3 prepare.py --out x",
    ),
    (
        "settings after a comment",
        f"{MAIN} data.seed=1 \\\n  # data.a=2 \\\n  data.train_batch_size=64\n",
        "verl does not see: data.train_batch_size=64",
    ),
    ("what is removed", f"{MAIN} data.seed=1 data.a=1 ~data.a", "Removed by ~.*: data.a"),
    (
        "groups of hydra",
        f"{MAIN} data.seed=1 reward=mine",
        "Not settings, and not imported: reward=mine",
    ),
    ("a config file", f"{MAIN} --config-name=mine data.seed=1", "The config mine is not here"),
    (
        "a program that is not known",
        "python -m my.train data.seed=1",
        "my.train is no program of verl that is known",
    ),
    (
        "another stage",
        f"torchrun -m verl.trainer.sft_trainer data.seed=2\n{MAIN} data.seed=1",
        "sft_trainer data.seed=2",
    ),
    (
        "a trap on each command",
        f"trap 'echo $BASH_COMMAND' DEBUG\ntrap 'echo over' EXIT\n/usr/bin/{MAIN} data.seed=1",
        r"Traps on DEBUG, which .*not known: 'echo \$BASH_COMMAND' DEBUG\.",
    ),
    ("a failure", f"{MAIN} data.seed=1\nfalse\nexit 3", "The script ended with status 3"),
]


@pytest.mark.parametrize(
    ("text", "said"), [row[1:] for row in NAMED], ids=[row[0] for row in NAMED]
)
def test_what_is_not_imported_is_named(text, said):
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
        ("verl.trainer.main_generation", "generation of answers"),
        ("verl.trainer.main_generation_server", "generation of answers"),
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
    builtin command -p ln -s {secret} a
    builtin command -p mkfifo b
    echo x > c
    {MAIN} data.seed=1
    """
    assert read(text).settings == {"data.seed": 1}


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
