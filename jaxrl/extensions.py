"""The one table of names that lead from the core to `extensions/`.

    core  --lookup("rollout.agent")-->  jaxrl_agents.agent_backend:AgentBackend

The core imports no extension. What a user names is looked up here when it is named, so that each package of
`extensions/` can be removed: whoever names something of it gets one line that says what to install.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from jaxrl.errors import UserError

EXTENSIONS = {
    # Commands, as the user types them after `jaxrl`.
    "browse": "jaxrl_browse.browse_command:main",
    "certify": "jaxrl_proofs.certify_command:main",
    "diff": "jaxrl_proofs.diff_command:main",
    "doctor": "jaxrl_pods.doctor:main",
    "fetch": "jaxrl_smollm2.smollm2:main",
    "import-verl": "jaxrl_verl.import_verl:main",
    "mesh": "jaxrl_planner.mesh_command:main",
    "plan": "jaxrl_planner.plan_command:main",
    "rehearse": "jaxrl_pods.rehearse:main",
    "replay": "jaxrl_proofs.replay_command:main",
    "report": "jaxrl_report.report_command:main",
    "serve": "jaxrl_serving.serve_command:main",
    # Flags of commands, and what stands in place of a path.
    "serve --tinker": "jaxrl_tinker.server:main",
    "a name on the Hugging Face hub": "jaxrl_hub.downloads:Hub",
    "gs:// and s3://": "jaxrl_buckets.buckets:Buckets",
    "data --pass_rate and --rewrite_answers": "jaxrl_cleaning.data_cleaning:clean",
    "train --dry_run": "jaxrl_planner.plan_command:show_traced",
    "train --supervise": "jaxrl_pods.supervise:supervise",
    "a path in gs:// or s3://": "jaxrl_buckets.paths_of_commands:with_local_paths",
    # Settings.
    "run.output in gs:// or s3://": "jaxrl_buckets.run_output:mirrored",
    'mesh.layout="auto" or rollout.slots="auto"': "jaxrl_planner.resolve:resolved",
    "reward.grader='code'": "jaxrl_code.code_grader:CodeGrader",
    "reward.grader='math'": "jaxrl_answers.math_grader:MathGrader",
    "reward.grader='math_verify'": "jaxrl_answers.math_verify_grader:MathVerifyGrader",
    "reward.grader='reasoning_gym'": "jaxrl_code.reasoning_gym_grader:ReasoningGymGrader",
    "SmolLM2-135M-Instruct": "jaxrl_smollm2.smollm2:fetch",
    "rollout.agent": "jaxrl_agents.agent_backend:AgentBackend",
    "run.certificate": "jaxrl_proofs.certificate:check",
    # Python.
    "OpenRun.serve": "jaxrl_agents.served:served",
    # What a run writes or prints at its end, if the package is there.
    "the report of a run": "jaxrl_report.run_report:write_run_report",
    "the planned peak memory": "jaxrl_planner.make_plan:peak_memory_line",
}
"""What a user names -> "package.module:function"."""


def is_installed(name: str) -> bool:
    """Whether the package of an entry of `EXTENSIONS` is there."""
    return importlib.util.find_spec(EXTENSIONS[name].partition(".")[0]) is not None


def lookup(name: str) -> Any:
    """Imports and returns the function of an entry of `EXTENSIONS`.

    Raises:
      UserError: its package is not installed.
    """
    module, _, function = EXTENSIONS[name].partition(":")
    if not is_installed(name):
        package = module.partition(".")[0]
        raise UserError(
            f"{name} needs {package}, which is not installed; bring back extensions/{package} of this "
            "version of jaxrl, or leave it out"
        )
    return getattr(importlib.import_module(module), function)
