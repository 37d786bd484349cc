"""Two loops of Tinker's cookbook, unmodified, teach SmolLM2-135M-Instruct sums on two CPU cores.

    jaxrl fetch
    python -m venv cookbook
    cookbook/bin/pip install 'tinker-cookbook[math-rl]==0.5.8' tinker==0.38.0
    cookbook/bin/pip install --no-deps tinker-cookbook==0.6.1
    python benchmarks/cookbook.py --python cookbook/bin/python --folder DIR [--seed 0]

`sl_loop` learns 64 solutions of two-digit sums, with the answer in \\boxed{}. `rl_loop`, which is GRPO, goes
on from its checkpoint with one-digit sums and their answers only: by itself SmolLM2 puts one answer of 100
into a box. The script writes the data and the tokenizer under the names that the loops look for, starts
`jaxrl serve --tinker`, runs the loops and prints their curves. The seed chooses the sums.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

from jaxrl.hub.hub_names import fetched_folder

# A model of Tinker's with ChatML and without thinking; the cookbook chooses its template by the name.
NAME = "Qwen/Qwen3-4B-Instruct-2507"
# The template looks these tokens up. They take the places of tokens that SmolLM2 has no use for here.
LOOKED_UP = ("<think>", "</think>", "<tool_call>", "</tool_call>")

SETTINGS = {
    "rl_loop": {
        "batch_size": 4,
        "group_size": 8,
        "max_tokens": 32,
        "learning_rate": 3e-4,
        "loss_fn": "importance_sampling",
        "max_steps": 16,  # the first four are those of sl_loop
    },
    "sl_loop": {"batch_size": 16, "max_length": 128, "learning_rate": 1e-3, "max_steps": 4},
}
SHOWN = {"rl_loop": "reward/total", "sl_loop": "train_mean_nll"}


def prepare(folder: pathlib.Path, seed: int) -> None:
    """Writes a folder from which the loops run: tokenizer, data, and the model."""
    tokenizer = folder / NAME
    tokenizer.mkdir(parents=True)
    content = json.loads((fetched_folder() / "tokenizer.json").read_text())
    renamed = {old["content"]: new for old, new in zip(content["added_tokens"][3:], LOOKED_UP)}  # noqa: B905
    for token in content["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {renamed.get(name, name): i for name, i in vocabulary.items()}
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    (tokenizer / "tokenizer_config.json").write_bytes(
        (fetched_folder() / "tokenizer_config.json").read_bytes()
    )
    choose = random.Random(seed)
    conversations, problems = [], []
    for _ in range(64):
        a, b = choose.randint(10, 99), choose.randint(10, 99)
        solution = f"{a} + {b} = {a + b}. \\boxed{{{a + b}}}"
        turns = (("user", f"What is {a} + {b}?"), ("assistant", solution))
        messages = [{"role": role, "content": content} for role, content in turns]
        conversations.append({"messages": messages})
    for _ in range(128):
        a, b = choose.randint(1, 9), choose.randint(1, 9)
        problems.append({"question": f"What is {a} + {b}?", "answer": f"It is.\n#### {a + b}"})
    data = (("openai/gsm8k/main", problems), ("HuggingFaceH4/no_robots", conversations))
    for name, rows in data:
        (folder / name).mkdir(parents=True)
        for split in ("train", "test"):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / name / f"{split}.jsonl").write_text(lines)
    (folder / "openai" / "gsm8k" / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n"
        "  - split: test\n    path: main/test.jsonl\n---\n"
    )


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[str]:
    """The address of a server, which ends with the block."""
    command = [sys.executable, "-m", "jaxrl", "serve", "--tinker", "--model", fetched_folder()]
    flags = {
        "name": NAME,
        "folder": folder / "saved",
        "port": 0,
        "slots": 32,
        "max_prompt_tokens": 208,
        "max_response_tokens": 32,
        "train_tokens": 512,
        "train_microbatches": 8,
        "max_rank": 16,
        "adapters": 2,
    }
    for name, value in flags.items():
        command += [f"--{name}", value]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as server:
        try:
            for line in server.stdout or ():
                if found := re.search(r"TINKER_BASE_URL=(\S+),", line):
                    yield found[1]
                    return
            raise SystemExit("the server has not started; its output says why")
        finally:
            server.terminate()


def curve(loop: str, url: str, python: pathlib.Path, folder: pathlib.Path) -> list[float]:
    """What the loop logs at each step: mean nll, or mean reward."""
    log = folder / loop
    settings = SETTINGS[loop] | {
        "base_url": url,
        "model_name": NAME,
        "lora_rank": 16,
        "log_path": log,
        "save_every": 0,
    }
    given = [f"{name}={value}" for name, value in settings.items()]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "TINKER_API_KEY": "tml-local"}
    command = [str(python), "-m", f"tinker_cookbook.recipes.{loop}", *given]
    subprocess.run(command, cwd=folder, env={**os.environ, **offline}, check=True)
    rows = [json.loads(row) for row in (log / "metrics.jsonl").read_text().splitlines()]
    return [row[SHOWN[loop]] for row in rows if SHOWN[loop] in row]


def curves(python: pathlib.Path, folder: pathlib.Path, seed: int) -> dict[str, list[float]]:
    """Runs both loops in an empty folder, with an interpreter that has the cookbook."""
    prepare(folder, seed)
    with serving(folder) as url:
        found = {"sl_loop": curve("sl_loop", url, python, folder)}
        # A loop goes on from the last checkpoint of its log.
        (folder / "rl_loop").mkdir()
        shutil.copy(folder / "sl_loop" / "checkpoints.jsonl", folder / "rl_loop")
        return found | {"rl_loop": curve("rl_loop", url, python, folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=pathlib.Path, required=True, help="of the cookbook")
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="empty, for the run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = curves(given.python.absolute(), given.folder.absolute(), given.seed)
    for loop, values in found.items():
        print(loop, SHOWN[loop], *(f"{value:.2f}" for value in values))


if __name__ == "__main__":
    main()
