"""Every setting of a run, with its one default. Recipes in `configs/` change the lines that matter.

Shapes and layouts of the model, the mesh, the learning step and the optimiser are declared in their own
rooms; what belongs to a run as a whole is declared here.
"""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from typing import Annotated, Any, Literal

from jaxrl.algos.kl import FULL, KL_ESTIMATES
from jaxrl.algos.policy_losses import RATIO_FREE
from jaxrl.algos.preference_losses import PREFERENCE_LOSSES
from jaxrl.algos.registry import check_options, named
from jaxrl.checks import (
    MAX_LAYERS,
    SEED,
    at_least,
    between,
    check_fields,
    check_value,
    count,
    finite,
    one_of,
    positive,
    token_count,
)
from jaxrl.data.made_pairs import MADE_PAIRS
from jaxrl.data.messages import check_template
from jaxrl.data.records import MAX_TASK_SEED, MAX_TASK_SIZE, check_task_options
from jaxrl.mesh.hosts import HostsConfig
from jaxrl.mesh.layout import LayoutConfig
from jaxrl.models.cached_attention_paged import IMPLEMENTATIONS as DECODE_IMPLEMENTATIONS
from jaxrl.models.config import ModelConfig
from jaxrl.recipes.registry import RECIPES
from jaxrl.rewards.judge import MAX_RESPONSE_CHARS, SCORE_TEMPLATE, JudgeTemplate, score_parser
from jaxrl.rewards.score import grader
from jaxrl.roles import losses
from jaxrl.roles.advantages import Estimator
from jaxrl.roles.correction import CorrectionConfig
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig
from jaxrl.rollout.sampling import MIN_P, REPETITION_PENALTY, TOP_K, TOP_P
from jaxrl.trainer.collapse import CollapseConfig


@dataclasses.dataclass(frozen=True)
class SourceConfig:
    """Where problems come from: a JSONL file, or a procedural task of reasoning-gym.

    Attributes:
      source: name under which metrics are kept.
      path: JSONL file; "" takes the task instead.
      prompt_field, answer_field, solution_field: its fields; solutions are for supervised training only.
      task, size, seed, options: reasoning-gym data set, how many problems, its seed and its own settings.
      limit: use only the first so many problems; 0 uses all.
    """

    source: str = ""
    path: str = ""
    prompt_field: str = "problem"
    answer_field: str = "answer"
    solution_field: str | None = None
    task: str = ""
    size: Annotated[int, at_least(0, at_most=MAX_TASK_SIZE)] = 0
    seed: Annotated[int, between(0, MAX_TASK_SEED)] = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    limit: Annotated[int, at_least(0)] = 0

    def __post_init__(self):
        check_fields(self)
        check_task_options(self.options)


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Prompts.

    Attributes:
      train, held_out: problems to train on and to evaluate with; no held-out question is trained on.
      template: text around a problem, which stands for "{prompt}".
      chat: send the prompt through the tokenizer's chat template, as one user message.
      max_prompt_tokens: longest prompt, template included.
      overlong: what happens to longer ones: left out, cut from the left, or refused.
      shuffle_seed: of the order of training prompts; None takes the run's seed.
    """

    train: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    held_out: SourceConfig = dataclasses.field(default_factory=SourceConfig)
    template: str = "{prompt}"
    chat: bool = False
    max_prompt_tokens: Annotated[int, token_count(1)] = 64
    overlong: Literal["drop", "left", "error"] = "drop"
    shuffle_seed: Annotated[int, SEED] | None = None

    def __post_init__(self):
        check_fields(self)
        check_template(self.template)


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """The tokenizer.

    Attributes:
      path: a Hugging Face tokenizer directory; "" trains a small one on the task's own text.
      vocab_size: upper bound of the small one, at least 258.
    """

    path: str = ""
    vocab_size: Annotated[int, between(258, 2**20)] = 320

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """Supervised learning before reinforcement learning, or alone: answers to imitate.

    Attributes:
      num_steps: optimiser updates; 0 skips the stage.
      path: JSONL file of conversations, or of questions with answers, as of
        `data.demonstrations.read_demonstrations`; "" takes the training problems' written solutions.
      prompt_field, response_field, messages_field: its fields. Of messages all that the assistant says is
        learnt.
      run: name of the run whose folder keeps the stage, so that several can start from one; "" is this run.
      examples_per_step: solutions of one update.
      optim: of this stage.
      save_every: steps between checkpoints.
      log_every: steps between rows of the log.
    """

    num_steps: Annotated[int, at_least(0)] = 0
    path: str = ""
    prompt_field: str = "prompt"
    response_field: str = "response"
    messages_field: str = "messages"
    run: str = ""
    examples_per_step: Annotated[int, count(1)] = 32
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    save_every: Annotated[int, at_least(1)] = 200
    log_every: Annotated[int, at_least(1)] = 1

    def __post_init__(self):
        check_fields(self)
        if self.run and not self.num_steps:
            raise ValueError(
                f"run {self.run!r} names a warm start to begin with, and num_steps 0 skips it; set num_steps "
                "as that run has it, or leave run empty"
            )


@dataclasses.dataclass(frozen=True)
class RolloutConfig:
    """Sampling of training data.

    Attributes:
      num_prompts: prompts of a step.
      num_samples: G, answers to each.
      generation_prompts: prompts of one generation batch; more than `num_prompts` over-samples.
      max_generation_batches: how many of these a step may take to find enough mixed groups.
      max_response_tokens: limit of a response, end-of-sequence included.
      temperature: divides the logits, in sampling and in training.
      top_k, top_p, min_p, min_response_tokens, repetition_penalty: which tokens may be drawn, as of
        `rollout.sampling.Truncation`. Training keeps the probabilities of the whole distribution.
      stop_ids: tokens that end a response besides the tokenizer's own.
      stop_strings: texts that do.
      environment: "path/to/file.py:function" or "package.module:function", called with a
        `rollout.environment.Turn` and the tokenizer whenever a response ends by itself; it returns token ids
        to append, or None. "" has none.
      partial: a step ends once its buffer of groups is full; what is unfinished goes on in the next.
      driver: "offline", or "jetstream" for that package's orchestrator (extra `jetstream`; one process).
      slots: samples decoded side by side.
      fewest_rows: of a decode state, however few samples are left; fewer decode a tail faster, and compile
        more programs.
      prefill_prompts: prompts of one prefill.
      prefill_chunk_tokens: prompts are prefilled so many tokens at a time; 0 is all at once.
      tokens_per_dispatch: tokens decoded between two looks of the host.
      dtype: of weights and activations in generation.
      kv_dtype: of the cache of keys and values; "" is `dtype`, int8 has a scale per token and head.
      decode_attention: to the cache, "auto" or one of `models.cached_attention_paged.IMPLEMENTATIONS`.
      unroll: layers per iteration of the layer scan.
    """

    num_prompts: Annotated[int, count(1)] = 32
    num_samples: Annotated[int, count(1)] = 8
    generation_prompts: Annotated[int, count(1)] = 48
    max_generation_batches: Annotated[int, count(1)] = 10
    max_response_tokens: Annotated[int, token_count(1)] = 64
    temperature: Annotated[float, positive(at_most=1000)] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    top_p: Annotated[float, TOP_P] = 1.0
    min_p: Annotated[float, MIN_P] = 0.0
    min_response_tokens: Annotated[int, token_count(0)] = 0
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0
    stop_ids: tuple[Annotated[int, at_least(0)], ...] = ()
    stop_strings: tuple[str, ...] = ()
    environment: str = ""
    partial: bool = False
    driver: Literal["offline", "jetstream"] = "offline"
    slots: Annotated[int, count(1)] = 256
    fewest_rows: Annotated[int, count(1)] = 32
    prefill_prompts: Annotated[int, count(1)] = 32
    prefill_chunk_tokens: Annotated[int, token_count(0)] = 0
    tokens_per_dispatch: Annotated[int, token_count(1)] = 16
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_dtype: Literal["", "float32", "bfloat16", "int8"] = ""
    decode_attention: Annotated[str, one_of("auto", *DECODE_IMPLEMENTATIONS)] = "auto"
    unroll: Annotated[int, at_least(1, at_most=MAX_LAYERS)] = 1

    def __post_init__(self):
        check_fields(self)
        if self.min_response_tokens >= self.max_response_tokens:
            raise ValueError(
                f"min_response_tokens {self.min_response_tokens} leaves no room below max_response_tokens "
                f"{self.max_response_tokens}, and every response would be cut; make it smaller"
            )
        if "" in self.stop_strings:
            raise ValueError(
                "a stop string is empty, which would end every response at once; drop it"
            )


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """A language model that is asked how good a response is (`rewards.judge`).

    Attributes:
      model: Hugging Face directory, with its tokenizer; "" has no judge.
      weight: of its score in the reward.
      template: what it is asked, with {response} and, if it is to see them, {question} and {answer}.
      chat: ask through the tokenizer's chat template.
      low, high: range of the number it is to end with ("Score: 7").
      failed_score: of a response whose verdict cannot be read.
      max_response_chars: longer responses are shown from their end.
      max_prompt_tokens, max_verdict_tokens: limits of what it reads and writes.
      slots: verdicts decoded side by side.
    """

    model: str = ""
    weight: Annotated[float, finite()] = 1.0
    template: str = SCORE_TEMPLATE
    chat: bool = True
    low: Annotated[float, finite()] = 0.0
    high: Annotated[float, finite()] = 10.0
    failed_score: Annotated[float, finite()] = 0.0
    max_response_chars: Annotated[int, at_least(1, at_most=MAX_RESPONSE_CHARS)] = 8000
    max_prompt_tokens: Annotated[int, token_count(1)] = 4096
    max_verdict_tokens: Annotated[int, token_count(1)] = 256
    slots: Annotated[int, count(1)] = 64

    def __post_init__(self):
        check_fields(self)
        JudgeTemplate(self.template)
        score_parser(low=self.low, high=self.high)


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Rewards.

    Attributes:
      grader: a name of `jaxrl.rewards.GRADERS`.
      grader_weight: of its +1 or -1 in the reward.
      functions: further reward functions, name -> {"path": where, "weight": w}; where is
        "package.module:function" or "path/to/file.py:function", as of `rewards.user`.
      functions_timeout_s: seconds that each of them may take for the responses of a step.
      model: Hugging Face directory of a reward model (...ForSequenceClassification) with the policy's
        tokenizer; "" has none.
      model_weight: of its score in the reward.
      judge: a model that is asked.
      overlong_buffer_tokens: width of the soft punishment before the limit; 0 turns it off.
      overlong_penalty: its depth.
      mask_truncated: leave truncated answers out of the loss (overlong filtering); they still count in their
        group's baseline.
    """

    grader: str = "answer"
    grader_weight: Annotated[float, finite()] = 1.0
    functions: dict[str, Any] = dataclasses.field(default_factory=dict)
    functions_timeout_s: Annotated[float, positive(at_most=threading.TIMEOUT_MAX)] = 600.0
    model: str = ""
    model_weight: Annotated[float, finite()] = 1.0
    judge: JudgeConfig = dataclasses.field(default_factory=JudgeConfig)
    overlong_buffer_tokens: Annotated[int, token_count(0)] = 16
    overlong_penalty: Annotated[float, at_least(0)] = 1.0
    mask_truncated: bool = False

    def __post_init__(self):
        check_fields(self)
        grader(self.grader)
        for name, function in self.functions.items():
            if name in ("grader", "model", "judge"):
                raise ValueError(
                    f"functions.{name} has the name of another reward, under which metrics are kept; "
                    "give it one of its own"
                )
            if not isinstance(function, dict) or set(function) != {"path", "weight"}:
                raise ValueError(
                    f"functions.{name} is {function!r}; give each function its path and its weight"
                )
            check_value(f"functions.{name}.path", function["path"], str)
            check_value(f"functions.{name}.weight", function["weight"], Annotated[float, finite()])


@dataclasses.dataclass(frozen=True)
class KlConfig:
    """The price of leaving the reference policy, which is the one training starts from.

    Attributes:
      reward_coef: price of a nat in the reward.
      reward_estimate: a name of `algos.kl.KL_ESTIMATES`; in the reward its value counts.
      loss_coef: price of a nat in the loss.
      loss_estimate: likewise, in the loss its gradient counts; or "full", the KL over the whole vocabulary,
        which takes the reference's forward pass into every update.
      target: the KL aimed for, to which `reward_coef` is adapted; 0 keeps it as it is.
      horizon: of the adaptation, in sequences.
    """

    reward_coef: Annotated[float, at_least(0)] = 0.0
    reward_estimate: Annotated[str, one_of(*KL_ESTIMATES)] = "k1"
    loss_coef: Annotated[float, at_least(0)] = 0.0
    loss_estimate: Annotated[str, one_of(*KL_ESTIMATES, FULL)] = "k3"
    target: Annotated[float, at_least(0)] = 0.0
    horizon: Annotated[float, at_least(1)] = 10_000.0

    def __post_init__(self):
        check_fields(self)
        if self.target and not self.reward_coef:
            raise ValueError(
                f"target {self.target} adapts reward_coef, which is 0 and would stay so; set it above 0"
            )

    @property
    def needs_reference(self) -> bool:
        """Some coefficient is not 0."""
        return self.reward_coef > 0 or self.loss_coef > 0

    @property
    def is_full(self) -> bool:
        """The loss has the KL over the whole vocabulary."""
        return self.loss_coef > 0 and self.loss_estimate == FULL

    @property
    def needs_ref_logprobs(self) -> bool:
        """The reference's probabilities of the sampled tokens are asked for."""
        return self.reward_coef > 0 or (self.loss_coef > 0 and not self.is_full)


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """What is learned from, and how.

    Attributes:
      recipe: a name of `recipes.registry.RECIPES`, the dataflow.
      advantage, advantage_options: a name of `algos.advantages.ADVANTAGES`, and its keywords.
      whiten: scale the advantages to mean 0 and deviation 1 over a step, as PPO does.
      loss, loss_options: a name of `algos.policy_losses.POLICY_LOSSES`, and its keywords.
      aggregation, aggregation_options: a name of `algos.aggregation.AGGREGATIONS`, and its keywords.
      entropy_coef: of the entropy bonus.
      kl: the price of leaving the reference policy.
      correction: for sampling with other probabilities than the trainer's.
      updates_per_step: minibatches of a step, one optimiser update each.
      one_step_off: sample the next step's answers while this step learns; the role "rollout" then has a pool
        of its own.
    """

    recipe: str = "dapo"
    advantage: str = "grpo"
    advantage_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    whiten: bool = False
    loss: str = "clipped"
    loss_options: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    )
    aggregation: str = "token-mean"
    aggregation_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    entropy_coef: Annotated[float, at_least(0)] = 0.0
    kl: KlConfig = dataclasses.field(default_factory=KlConfig)
    correction: CorrectionConfig = dataclasses.field(default_factory=CorrectionConfig)
    updates_per_step: Annotated[int, count(1)] = 4
    one_step_off: bool = False

    def __post_init__(self):
        check_fields(self)
        correction = self.correction
        # In bypass the ratio of a loss that has one is to the sampler's policy.
        corrects = correction.weighs or (correction.bypass and self.loss not in RATIO_FREE)
        if self.one_step_off and not corrects:
            raise ValueError(
                "one_step_off samples from weights of one step ago, and nothing corrects for it; set "
                'correction.weights to "token" or "sequence", or correction.bypass to True for a loss with a '
                "ratio"
            )
        named(RECIPES, self.recipe, "recipe")
        # Built and dropped: they hold names and options against the functions that take them.
        Estimator.of(self.advantage, self.advantage_options)
        losses.policy(
            self.loss,
            self.loss_options,
            aggregation=self.aggregation,
            aggregation_options=self.aggregation_options,
        )


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """The critic of recipes that have one, and the critic of costs.

    Attributes:
      weights: Hugging Face directory to start from; "" takes the actor's first weights, with a head of zeros.
      optim: its optimiser.
      clip: how far a value may move in a step, in units of reward; inf for none.
      warmup_steps: steps in which the critic learns alone.
    """

    weights: str = ""
    optim: OptimConfig = dataclasses.field(default_factory=lambda: OptimConfig(lr=1e-5))
    clip: Annotated[float, positive(or_inf=True)] = 0.5
    warmup_steps: Annotated[int, at_least(0)] = 0

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class CostConfig:
    """What Safe RLHF keeps below a limit.

    Attributes:
      model: Hugging Face directory of a cost model (...ForSequenceClassification).
      limit: mean cost that is still acceptable.
      multiplier: the Lagrange multiplier to begin with.
      multiplier_lr: learning rate of its logarithm.
      pretrain_coef: weight of the loss on written solutions (`data.train.solution_field`) in the actor's
        updates; 0 leaves it out.
    """

    model: str = ""
    limit: Annotated[float, finite()] = 0.0
    multiplier: Annotated[float, positive()] = 1.0
    multiplier_lr: Annotated[float, at_least(0)] = 0.1
    pretrain_coef: Annotated[float, at_least(0)] = 0.0

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """Learning from pairs of answers, of which one was chosen: reward models, cost models, DPO.

    Attributes:
      path, held_out_path: JSONL files of pairs, as of `data.preferences.read_preferences`; "" makes pairs of
        the problems of `data` instead.
      made: how, a name of `data.made_pairs.MADE_PAIRS`.
      margin_field: field of the files with margins; "" has none.
      harm_fields: the two fields that say which answer does harm; () has none.
      loss, options: a name of `algos.preference_losses.PREFERENCE_LOSSES`, and its keywords: "bradley_terry"
        or "cost_preference" of a model that scores, "dpo" or "ipo" of a policy.
      num_steps: optimiser updates.
      pairs_per_step: of one update.
      held_out_pairs: how many pairs the accuracy is measured on.
      every: steps between two measurements.
      optim: the optimiser.
    """

    path: str = ""
    held_out_path: str = ""
    made: str = "right_or_wrong"
    margin_field: str = ""
    harm_fields: tuple[str, ...] = ()
    loss: str = "bradley_terry"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_steps: Annotated[int, at_least(1)] = 1000
    pairs_per_step: Annotated[int, count(1)] = 16
    held_out_pairs: Annotated[int, count(1)] = 256
    every: Annotated[int, at_least(1)] = 100
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)

    def __post_init__(self):
        check_fields(self)
        named(MADE_PAIRS, self.made, "made")
        loss = named(PREFERENCE_LOSSES, self.loss, "preference loss")
        check_options(loss, self.options, f"preference loss {self.loss!r}")
        if bool(self.path) != bool(self.held_out_path):
            raise ValueError("path and held_out_path go together: set both, or neither")
        if len(self.harm_fields) not in (0, 2):
            raise ValueError(
                f"harm_fields {self.harm_fields}: name the fields of the chosen and of the rejected answer"
            )


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation on the held-out problems.

    Attributes:
      every: steps between evaluations; there is also one before the first step and one after the last.
      num_samples: answers to each problem; accuracy is their mean (avg@n).
      temperature: 0 is greedy.
      top_k, top_p, min_p: which tokens may be drawn, as of `rollout.sampling.Truncation`.
    """

    every: Annotated[int, at_least(1)] = 10
    num_samples: Annotated[int, count(1)] = 8
    temperature: Annotated[float, between(0, 1000)] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    top_p: Annotated[float, TOP_P] = 1.0
    min_p: Annotated[float, MIN_P] = 0.0

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What a run leaves behind and how long it goes on.

    Attributes:
      output: folder under which each run has its own, <output>/<name>/seed<seed>.
      num_steps: rollout steps.
      save_every: steps between checkpoints; the last step is always saved.
      keep_checkpoints: how many of the newest stay, besides one from before a collapse.
      collapse: what counts as one.
      resume: "auto" goes on from the newest intact checkpoint, and refuses a stage that has begun and has
        none left; "or_restart" begins such a stage again, with what is there moved aside; "never" refuses a
        folder that holds a run.
      wandb_project: also log to this wandb project (extra `wandb`); "" does not.
      report_samples: held-out problems whose answers the report shows before and after.
    """

    output: str = "runs"
    num_steps: Annotated[int, at_least(1)] = 100
    save_every: Annotated[int, at_least(1)] = 10
    keep_checkpoints: Annotated[int, count(1)] = 2
    collapse: CollapseConfig = dataclasses.field(default_factory=CollapseConfig)
    resume: Literal["auto", "or_restart", "never"] = "auto"
    wandb_project: str = ""
    report_samples: Annotated[int, count(0)] = 8

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run.

    Attributes:
      name: of the recipe; names the output folder.
      seed: of weights, data order and sampling.
      weights: Hugging Face directory to start from; "" starts from random weights.
      adapter: PEFT directory that adapters (`model.lora`) start from; "" starts them fresh.
      hardware: for people: what the recipe is meant to run on.
      placement: which roles live on which devices, pool -> row, as of `mesh.pools.read_placement`; empty has
        all of them on all devices.
    """

    name: str = "run"
    seed: Annotated[int, SEED] = 0
    weights: str = ""
    adapter: str = ""
    hardware: str = ""
    hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
    mesh: LayoutConfig = dataclasses.field(default_factory=LayoutConfig)
    placement: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    warm_start: WarmStartConfig = dataclasses.field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    cost: CostConfig = dataclasses.field(default_factory=CostConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    evaluation: EvaluationConfig = dataclasses.field(default_factory=EvaluationConfig)
    run: RunConfig = dataclasses.field(default_factory=RunConfig)

    def __post_init__(self):
        check_fields(self)
        if self.adapter and not (self.weights and self.model.lora.rank):
            raise ValueError(
                f"adapter {self.adapter} sits on the weights of a base model and is trained as model.lora; "
                "set weights and model.lora.rank"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_response_tokens
        if self.train.row_tokens < longest:
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
    def run_folder(self) -> pathlib.Path:
        """Where everything of this run lies."""
        return self._folder_of(self.name)

    @property
    def warm_start_folder(self) -> pathlib.Path:
        """Where the warm start lies, of this run or of another one with the same seed."""
        return self._folder_of(self.warm_start.run or self.name) / "sft"

    def _folder_of(self, name: str) -> pathlib.Path:
        return pathlib.Path(self.run.output) / name / f"seed{self.seed}"
