"""`Config`: all settings of a run, and the checks that need several groups of them.

Each package declares its own settings, with default and range, beside the code that reads them. Recipes in
`configs/` change the settings that matter to them.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

from jaxrl.checks import FOLDER_NAME, NAME, PATH, SEED, count, settings, shown, steps
from jaxrl.data.data_config import DataConfig, TokenizerConfig
from jaxrl.dataflows.algorithm_config import (
    AlgorithmConfig,
    CostConfig,
    CriticConfig,
    TeacherConfig,
)
from jaxrl.files import local_folder
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.mesh.pools import PoolSettings
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.reward_config import RewardConfig
from jaxrl.roles.optimizer import OptimConfig, StageOptimConfig
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.backend import SamplingOptions
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.rollout.sampling import GREEDY_OR_TEMPERATURE, TOP_K, TOP_P, truncation_of
from jaxrl.tracking.run_folder import RunConfig, RunFolder, StageFolder
from jaxrl.user_code import names_function


@settings
class SftConfig:
    """Supervised learning (SFT), before reinforcement learning or by itself."""

    num_steps: Annotated[int, steps(0)] = 0
    """Number of optimiser updates; 0 skips the stage."""
    path: Annotated[str, PATH] = ""
    """JSONL file of conversations, or of questions with answers, in the format of
    `data.demonstrations.read_demonstrations`; "" uses the written solutions of the training
    problems.
    """
    run: Annotated[str, FOLDER_NAME] = ""
    """Name of the run whose folder holds the result, so that several runs can share it; "" is
    this run.
    """
    examples_per_step: Annotated[int, count(1)] = 32
    """Number of examples per update."""
    optim: StageOptimConfig = dataclasses.field(default_factory=StageOptimConfig)
    """Optimiser of this stage."""
    save_every: Annotated[int, steps(1)] = 200
    """Number of steps between checkpoints."""

    def __post_init__(self):
        if self.run and not self.num_steps:
            raise ValueError(
                f"run {self.run!r} names an SFT stage to begin with, and num_steps 0 skips it; set num_steps "
                "as that run has it, or leave run empty"
            )


@settings
class PreferenceConfig:
    """Learning from pairs of answers, one chosen and one rejected: reward models, cost models, DPO.

    It uses the optimiser `optim`, runs for `run.num_steps` updates and measures its accuracy every
    `evaluation.every` steps.
    """

    path: Annotated[str, PATH] = ""
    """JSONL file of pairs, in the format of `data.preferences.read_preferences`; or a function
    that makes pairs of the problems of `data`, for training and for evaluation,
    "path/to/file.py:function": it takes `data.Record`s and returns `data.Preference`s.
    """
    evaluation_path: Annotated[str, PATH] = ""
    """JSONL file of evaluation pairs. With "" nothing is evaluated if `path` is a file."""
    loss: Annotated[str, NAME] = ""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Name of `algos.preference_losses.PREFERENCE_LOSSES`, and its keyword arguments.
    "bradley_terry" and "cost_preference" train a scalar model, "dpo" and "ipo" a policy. ""
    learns from no pairs.
    """
    pairs_per_step: Annotated[int, count(1)] = 16
    """Number of pairs per update."""

    def __post_init__(self):
        if self.evaluation_path and not self.path:
            raise ValueError(
                f"evaluation_path {self.evaluation_path!r} is a file of pairs, and path names none to train "
                "on; set path"
            )

    @property
    def makes_pairs(self) -> bool:
        """Whether `path` names a function."""
        return not self.path or names_function(self.path)


@settings
class EvaluationConfig:
    """Evaluation of the policy on the evaluation problems."""

    every: Annotated[int, steps(-1)] = 10
    """Number of steps between evaluations. One more runs before the first step and after the
    last. 0 evaluates nothing, -1 before the first step alone.
    """
    num_samples: Annotated[int, count(1)] = 8
    """Number of answers per problem; accuracy is their mean (avg@n)."""
    temperature: Annotated[float, GREEDY_OR_TEMPERATURE] = 1.0
    """Sampling temperature; 0 is greedy."""
    top_k: Annotated[int, TOP_K] = 0
    top_p: Annotated[float, TOP_P] = 1.0
    """Limits on the tokens that can be drawn, as in `rollout.sampling.Truncation`. A top_k of 0
    is no limit.
    """

    def sampling(self, training: SamplingOptions, *, step: int) -> SamplingOptions:
        """Options of sampling answers to the evaluation prompts, with the sampling keys of `step`.

        Stop strings belong to the task, so they are those of training.
        """
        return dataclasses.replace(
            training,
            num_samples=self.num_samples,
            step=step,
            temperature=self.temperature,
            truncation=truncation_of(top_k=self.top_k, top_p=self.top_p),
            # Nothing is trained on these answers.
            keeps_routes=False,
        )


@settings
class Config:
    """All settings of a run."""

    name: Annotated[str, FOLDER_NAME] = "run"
    """Name of the recipe; also the name of the folder in `run.output`."""
    seed: Annotated[int, SEED] = 0
    """Random seed of weights, data order and sampling."""
    weights: Annotated[str, PATH] = ""
    """Hugging Face directory with the initial weights; "" starts from random weights."""
    adapter: Annotated[str, PATH] = ""
    """PEFT directory with the initial adapters (`model.lora`); "" starts with new adapters."""
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    mesh: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    placement: dict[str, PoolSettings] = dataclasses.field(default_factory=dict)
    """Devices of each role, as a dict of pool name -> `mesh.pools.PoolSettings`; {} puts all roles
    on all devices.
    """
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    sft: SftConfig = dataclasses.field(default_factory=SftConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    cost: CostConfig = dataclasses.field(default_factory=CostConfig)
    teacher: TeacherConfig = dataclasses.field(default_factory=TeacherConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)

    def __post_init__(self):
        if not self.name.strip():
            raise ValueError(f"name {self.name!r} is empty; give the run's folder a name")
        if self.adapter and not (self.weights and self.model.lora.rank):
            raise ValueError(
                f"adapter {shown(self.adapter)} sits on the weights of a base model and is trained as "
                "model.lora; set weights and model.lora.rank"
            )
        if self.train.replay_routes and self.rollout.agent:
            raise ValueError(
                "train.replay_routes takes the experts of one answer to a prompt, and rollout.agent makes "
                "conversations of several; set one of the two off"
            )
        if self.data.chat and self.rollout.agent:
            raise ValueError(
                "data.chat renders prompts as chats, and rollout.agent writes the "
                "messages of its chats itself; set data.chat to False"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if self.row_tokens < longest:
            raise ValueError(
                f"train.row_tokens {self.train.row_tokens} cannot hold the longest sequence, "
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + rollout.max_response_tokens "
                f"{self.rollout.max_response_tokens} = {longest}; raise it to at least {longest}"
            )
        batch = self.rollout.num_prompts * self.rollout.num_samples
        if batch % self.algorithm.updates_per_step:
            raise ValueError(
                f"rollout.num_prompts {self.rollout.num_prompts} x rollout.num_samples "
                f"{self.rollout.num_samples} = {batch} sequences do not divide into "
                f"algorithm.updates_per_step {self.algorithm.updates_per_step} minibatches; "
                "choose a divisor"
            )
        if self.reward.overlong_buffer_tokens >= self.rollout.max_response_tokens:
            raise ValueError(
                f"reward.overlong_buffer_tokens {self.reward.overlong_buffer_tokens} leaves nothing "
                f"unpunished of rollout.max_response_tokens {self.rollout.max_response_tokens}; "
                "make it smaller"
            )

    @property
    def longest_sequence(self) -> int:
        """The largest number of tokens of a prompt and its response together."""
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def prompts_per_batch(self) -> int:
        """The number of prompts of a generation batch."""
        rollout, dynamic = self.rollout, self.algorithm.flow.dynamic_sampling
        return rollout.generation_prompts if dynamic else rollout.num_prompts

    @property
    def problems_per_batch(self) -> int:
        """The number of problems of a generation batch, each with a prompt for every role that learns."""
        return self.prompts_per_batch // max(1, len(self.rollout.learning_roles))

    @property
    def truncates_logprobs(self) -> bool:
        """Whether log-probabilities of training data are those among the tokens that its sampling keeps."""
        return self.algorithm.truncated_logprobs and bool(self.rollout.truncation().keeps_some)

    @property
    def row_tokens(self) -> int:
        """The value of `train.row_tokens`; "auto" is the longest sequence, in multiples of 64."""
        if self.train.row_tokens != "auto":
            return self.train.row_tokens
        return max(256, -(-self.longest_sequence // 64) * 64)

    @property
    def run_folder(self) -> RunFolder:
        return self._folder_of(self.name)

    @property
    def sft_folder(self) -> StageFolder:
        """The folder of the supervised warm-up, of this run or of another run with the same seed."""
        return self._folder_of(self.sft.run or self.name).sft

    def _folder_of(self, name: str) -> RunFolder:
        return RunFolder(local_folder(self.run.output) / name / f"seed{self.seed}")
