"""Supervised fine-tuning (SFT), before reinforcement learning or by itself."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl.config.shapes import row_limits
from jaxrl.data.demonstrations import DemonstrationStream
from jaxrl.data.preferences import PreferenceStream
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.step_metrics import prefixed, work_metrics
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.mesh import hosts
from jaxrl.mesh.handover import put
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.mesh.sharding_strategies import state_rules
from jaxrl.models import lora
from jaxrl.models.decoder import Params, fitted, init_params
from jaxrl.models.huggingface.weight_loading import load_adapter, load_params
from jaxrl.roles.batches import pack_examples
from jaxrl.roles.learner import Learner
from jaxrl.roles.losses import SUPERVISED
from jaxrl.roles.packed_model import PackedModel
from jaxrl.roles.policy import Actor
from jaxrl.rollout.rollout_config import START
from jaxrl.trainer.context import RunContext, supervised_stream
from jaxrl.trainer.identity import check_sft_stage, sft_settings
from jaxrl.trainer.loop import Schedule, TrainingStage, open_loop
from jaxrl.trainer.roles import Roles


def load_or_init(run: RunContext) -> Params:
    """The initial weights of the policy, in the actor's training layout.

    They come from the checkpoint that the config names, or from the seed. A model with adapters gets those of
    `config.adapter`, or new ones.
    """
    config, model = run.config, run.model
    layout = run.placement.pool_of("actor").config_of("actor")
    rules = state_rules(layout.sharding)
    packed = PackedModel(model, run.meshes["actor"], train=config.train, state_rules=rules)
    where = packed.train_shardings
    key = jax.random.key(config.seed)
    if not config.weights:
        # Born sharded: no device holds the whole model.
        make = lambda key: fitted(init_params(model, key), packed.shapes)  # noqa: E731
        return jax.jit(make, out_shardings=where)(key)
    params = load_params(config.weights, model, where, dtype=packed.frozen_dtype)
    if config.adapter:
        return lora.join(load_adapter(config.adapter, model, where), params)
    if model.lora.rank:
        (like, _), (adapters, _) = map(lora.split, (packed.shapes, where))
        fresh = lambda key: fitted(lora.fresh_adapters(model, key), like)  # noqa: E731
        return lora.join(jax.jit(fresh, out_shardings=adapters)(key), params)
    return params


def start_from(roles: Roles, params: Params, run: RunContext) -> None:
    """Gives every learner and the reference their first weights. The actor takes `params` over."""
    keep_reference(roles, params)
    directory = run.config.critic.weights
    # A critic trains all of its weights, so it starts from the base model without the policy's adapters.
    trunk = lora.split(params)[1] if run.config.model.lora.rank else params
    for name, critic in roles.critics.items():
        if directory:
            # The files of a language model hold no score head.
            num_scores = run.resolved.model_in(directory).num_scores
            stored = dataclasses.replace(critic.model, num_scores=num_scores)
            where = PackedModel(
                stored, critic.mesh, train=critic.train, state_rules=critic.state_rules
            ).train_shardings
            first = load_params(directory, stored, where)
        else:
            # The critic has a head of its own.
            kept = {name: leaf for name, leaf in trunk.items() if name != "unembedding"}
            first = copied(kept, critic)
        critic.start_from(first)
    # Last, because it donates the weights that the others have copied.
    roles.actor.start_from(params)


def freeze_roles(actor: Actor, run: RunContext, starting: Callable[[], Params]) -> None:
    """Gives the sampler the weights of the roles of an agent that do not learn."""
    config = run.config
    for name in sorted({*config.rollout.frozen_roles.values()}):
        if name == START:
            params = starting()
        else:
            of_files = dataclasses.replace(config, weights=name, adapter="")
            resolved = dataclasses.replace(run.resolved, config=of_files)
            params = load_or_init(dataclasses.replace(run, resolved=resolved))
        actor.freeze(name, copied(params, actor))


def keep_reference(roles: Roles, params: Params) -> None:
    """Gives the reference, if there is one, a copy of the initial weights of training."""
    if roles.reference is not None:
        roles.reference.load(copied(params, roles.reference))


def copied(params: Params, role: PackedModel) -> Params:
    """A copy of weights in new buffers and the layout of a role, on the same mesh or another one."""

    def one(x: jax.Array, like: Any, where: NamedSharding) -> jax.Array:
        if x.shape != like.shape:
            # Other stages hold other numbers of layers. For a moment the leaf is whole on each.
            here: Any = x.sharding
            whole = NamedSharding(here.mesh, P(None, *here.spec[1:]))
            x = jax.jit(lambda x: fitted(x, like), out_shardings=whole)(x)
        # `put` may keep a buffer as it is, and an update of the actor would overwrite it.
        return put(jnp.copy(x), where)

    of_role = [
        {name: tree[name] for name in params} for tree in (role.shapes, role.train_shardings)
    ]
    return jax.tree.map(one, params, *of_role)


def starting_params(run: RunContext, stop: StopSignal) -> Params:
    """The policy's weights for reinforcement learning, after SFT if there is any, in the training layout.

    Raises:
      StopRequested: a signal arrived during SFT; the last finished step is saved.
    """
    if not run.config.sft.num_steps:
        return load_or_init(run)
    return fine_tuned(run, stop).for_training().params


def fine_tuned(run: RunContext, stop: StopSignal, *, samples: bool = False) -> Actor:
    """Trains an actor by SFT, with the settings `config.sft`.

    Args:
      run, stop: the run, and signals to it.
      samples: whether the actor will also sample.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
    """
    options = run.config.sft
    optim = dataclasses.replace(run.config.optim, **vars(options.optim))
    actor = run.roles.actor(optim=optim, samples=samples)
    # A row waits for its step, so a long stage has only some sixty.
    schedule = Schedule(options.num_steps, options.save_every, max(1, options.num_steps // 60))
    loop = open_loop(run, "SFT", run.config.sft_folder, schedule, stop)
    loop.run(SupervisedStage(run, actor, loop))
    return actor


class ExamplesStage(TrainingStage, abc.ABC):
    """Training of one learner on a stream of examples or pairs."""

    def __init__(
        self,
        run: RunContext,
        learner: Learner,
        timer: StepTimer,
        stream: DemonstrationStream | PreferenceStream,
        *,
        name: str,
        begin_weights: Callable[[bool], None],
    ):
        """Args:
        run, learner, timer, stream: the run, the role to train, the loop and the examples.
        name: name of the role.
        begin_weights: function that sets the initial weights; in a resumed stage (True) only those that no
            checkpoint holds.
        """
        self._begin_weights = begin_weights
        self._run = run
        self._learner = learner
        self._timer = timer
        # Of examples or of pairs: each stage knows which.
        self._stream: Any = stream
        self._name = name

    @property
    def learners(self) -> Mapping[str, Learner]:
        return {self._name: self._learner}

    def begin(self, record: Mapping[str, Any] | None) -> None:
        """Sets the initial weights, or restores the position in the stream from a checkpoint."""
        self._begin_weights(record is not None)
        if record is not None:
            self._stream.restore(record["stream"])

    def record(self) -> dict[str, Any]:
        return {"stream": self._stream.state()}


class SupervisedStage(ExamplesStage):
    """Supervised fine-tuning of an actor."""

    def __init__(self, run: RunContext, actor: Actor, timer: StepTimer):
        """Raises UserError if there are no examples to learn from."""
        self._actor = actor
        # An example may fill a whole row, also beyond the limit of sampled answers.
        self._limits = row_limits(run.config, longest=run.config.row_tokens)
        stream = supervised_stream(
            run,
            run.demonstrations,
            examples_per_batch=run.config.sft.examples_per_step,
            max_tokens=self._limits.longest,
        )
        super().__init__(
            run,
            actor,
            timer,
            stream,
            name="actor",
            begin_weights=lambda resumed: None if resumed else actor.start_from(load_or_init(run)),
        )

    def begin(self, record: Mapping[str, Any] | None) -> None:
        """See `ExamplesStage`; raises UserError if a run with other settings has made the stage."""
        if record is not None:
            check_sft_stage(self._run.config, record["settings"], self._run.contents)
        super().begin(record)

    def record(self) -> dict[str, Any]:
        return super().record() | {"settings": sft_settings(self._run.config, self._run.contents)}

    def step(self) -> Metrics:
        """Packs the next examples, and runs one optimiser update on them."""
        examples = next(iter(self._stream))
        with self._timer.phase("pack", may_stop=True):
            # Other examples on one host would make other weights there.
            hosts.check_same(
                f"the examples of step {self._timer.step + 1}",
                [part for example in examples for part in example],
            )
            shape = self._limits.shape(self._run.config.sft.examples_per_step, minibatches=1)
            batch, packing = pack_examples(examples, shape, **self._actor.rows_of(shape))
            metrics = {
                "train/num_trained_tokens": float(sum(mask.sum() for *_, mask in examples)),
                "perf/total_num_tokens": float(packing.lengths.sum()),
            }
            batch, metrics = self._actor.place(batch), metrics | work_metrics(self._actor, packing)
        with self._timer.phase("update_actor", shown="update"):
            # The devices work on after the call returns; the phase must have their time.
            update = jax.block_until_ready(self._actor.update(batch, SUPERVISED))
        values = prefixed("actor", hosts.fetch(update))
        return metrics | {
            "sft/loss": values["actor/pg_loss"],
            "sft/mean_token_prob": values["actor/mean_token_prob"],
            "sft/grad_norm": values["actor/grad_norm"],
            "sft/lr": values["actor/lr"],
        }
