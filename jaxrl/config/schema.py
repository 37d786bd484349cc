"""`Config`: all settings of a run, and the checks that need several groups of them.

Each package declares its own settings, with default and range, beside the code that reads them. Recipes in
`configs/` change the settings that matter to them.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

from jaxrl.checks import FOLDER_NAME, PATH, SEED, settings, shown
from jaxrl.config.stages import EvaluationConfig, PreferenceConfig, SftConfig
from jaxrl.data.data_config import DataConfig, TokenizerConfig
from jaxrl.dataflows.algorithm_config import (
    AlgorithmConfig,
    CostConfig,
    CriticConfig,
    TeacherConfig,
)
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.reward_config import RewardConfig
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.train_config import TrainConfig
from jaxrl.rollout.rollout_config import RolloutConfig
from jaxrl.tracking.run_config import RunConfig
from jaxrl.tracking.run_folder import RunFolder, StageFolder


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
    placement: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Devices of each role, as a dict of pool name -> pool settings in the format of
    `mesh.pools.read_placement`; {} puts all roles on all devices.
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
        """The output folder of this run."""
        return self._folder_of(self.name)

    @property
    def sft_folder(self) -> StageFolder:
        """The folder of the supervised warm-up, of this run or of another run with the same seed."""
        return self._folder_of(self.sft.run or self.name).sft

    def _folder_of(self, name: str) -> RunFolder:
        return RunFolder(pathlib.Path(self.run.output) / name / f"seed{self.seed}")
