"""Reinforcement learning as a training stage: the config's dataflow, step after step.

One step on one pool of devices. Each line begins when the line that it waits for has ended:

    gen            prompts -> engine, all slots -> groups       waits for the weights, moved from training
      grading        groups, one by one, in other processes     beside gen, for groups that have finished
    reward         functions, reward model, judge               waits for gen, and for the last verdict
    pack           rows of [U, M, R, T]                         waits for reward
    old_log_prob   the actor again; ref, values                 waits for pack and for the weights to return
    adv            advantages over the whole step               waits for them
    update         U updates                                    waits for adv; metrics wait for update
      saving         checkpoint, rollouts, logs                 beside the next step

With `rollout.max_staleness` and a pool of its own for the role "rollout" the sampler goes on while a step
learns, with the newest weights that arrived; `gen` is then the wait for enough groups
(`dataflows.free_running`).

`begin` gives the roles their weights; `record` returns the state of a resumable run. `run_rewards` builds the
rewards, `run_step` the sampler and the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl.config.shapes import stop_ids_of
from jaxrl.dataflows.dynamic_sampling import NotEnoughGroups
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.free_running import FreeRunning
from jaxrl.dataflows.step_timer import StepTimer
from jaxrl.errors import UserError
from jaxrl.mesh.handover import Handover
from jaxrl.mesh.interrupt import StopSignal
from jaxrl.models.decoder import Params
from jaxrl.roles.learner import Learner
from jaxrl.tracking.kept_rollouts import KeptRollouts
from jaxrl.trainer.context import RunContext, training_prompts
from jaxrl.trainer.evaluation import Evaluation
from jaxrl.trainer.loop import Schedule, TrainingStage, open_loop
from jaxrl.trainer.role_table import ROLES
from jaxrl.trainer.roles import Roles, build_roles
from jaxrl.trainer.run_rewards import graders_of, reward_functions, rewards_of
from jaxrl.trainer.run_step import RunSampling, StepState, build_step, recorded_schedule
from jaxrl.trainer.supervised import freeze_roles, keep_reference, start_from, starting_params


def reinforce(run: RunContext, stop: StopSignal) -> None:
    """Trains the roles of a run by reinforcement learning, to the last step of its config.

    Raises:
      StopRequested: a signal arrived; the last finished step is saved.
      UserError: too few groups have both right and wrong answers, or a metric is not finite.
    """
    config = run.config
    roles = build_roles(run.resolved, run.meshes, run.models)
    every = config.evaluation.every if len(run.evaluation_prompts) else 0
    schedule = Schedule(config.run.num_steps, config.run.save_every, evaluate_every=every)
    title = run.resolved.dataflow.title
    loop = open_loop(run, title, config.run_folder.rl, schedule, stop)
    loop.run(RlStage(run, roles, loop, functools.partial(starting_params, run, stop)))


class RlStage(TrainingStage):
    """Reinforcement learning by the config's dataflow.

    Attributes:
      parts: the parts of a step, as a dataflow gets them.
      prompts: the problems, in the order of training.
    """

    def __init__(
        self,
        run: RunContext,
        roles: Roles,
        timer: StepTimer,
        starting_params: Callable[[], Params],
    ):
        """Builds everything except weights, which `begin` sets.

        Args:
          run: the run.
          roles: roles of the run, without weights.
          timer: loop of the stage.
          starting_params: function that returns the policy's initial weights, in the actor's training layout;
            called only if they are needed.

        Raises:
          UserError: a reward function cannot be imported, `data.sampler` cannot choose the prompts, or a
            recorded schedule cannot be repeated.
        """
        config = run.config
        self._run = run
        self._roles = roles
        self._timer = timer
        self._starting_params = starting_params
        self._graders = graders_of(config, run.problems.settings)
        self._evaluation = Evaluation(run, self._graders)
        self._state = StepState.of(run)
        recorded = recorded_schedule(config)
        self.prompts = training_prompts(run)
        # It starts a process, and only `close` ends it: nothing after this may raise.
        self._functions = reward_functions(config, timer)
        rewards = rewards_of(config, roles, timer, self._graders, self._functions)
        self._sampling = RunSampling(run, roles.actor, timer, rewards, self.prompts, recorded)
        self._rollouts = KeptRollouts(
            config.run,
            config.run_folder,
            run.tokenizer,
            timer,
            stop_ids=stop_ids_of(config.rollout, run.tokenizer),
            terms=rewards.term_names,
            # A step that trains on the sampler's log-probabilities has none of the trainer's.
            has_old_logprob=not config.algorithm.correction.bypass,
        )
        self.parts = build_step(
            run, roles, timer, self._state, self._sampling, rewards, self._rollouts.look
        )

    @property
    def learners(self) -> Mapping[str, Learner]:
        """The roles that are trained."""
        return self._roles.learners

    def begin(self, record: Mapping[str, Any] | None) -> None:
        """Sets the initial weights of the roles; in a resumed stage only those that no checkpoint holds."""
        for name, role in self._roles.others.items():
            if directory := ROLES[name].weights(self._run.config):
                ROLES[name].load(role, self._run.models.by_role[name], directory)
        starting = functools.cache(self._starting_params)
        freeze_roles(self._roles.actor, self._run, starting)
        if record is None:
            start_from(self._roles, starting(), self._run)
            return
        if self._roles.reference is not None:
            keep_reference(self._roles, starting())
        self._state.restore(record)
        self._sampling.sampler.restore(record["sampling"], self.prompts)

    def step(self) -> Metrics:
        """Runs one step of the dataflow, with an evaluation beside it if one is due (`evaluate`)."""
        self._rollouts.begin_step()
        # Begins the evaluation that `evaluate` left to this step. The number of the step alone decides: a run
        # that was resumed here makes it too.
        every, step = self._run.config.evaluation.every, self._timer.step
        evaluates = every and len(self._run.evaluation_prompts)
        is_due = evaluates and step and every > 0 and step % every == 0
        sampler = self._beside if is_due else None
        finish_evaluation = None if sampler is None else self._evaluation.begin(sampler)
        try:
            metrics = self._run.resolved.dataflow(self.parts, self.prompts)
        except NotEnoughGroups as error:
            path = self._rollouts.look_at_failed(error.sampled)
            raise UserError(f"{error}. What was sampled is in {path}") from error
        if isinstance(handover := self._roles.actor.resharding, Handover):
            # A device of the sampler received as much before it sampled.
            metrics = {**metrics, "perf/handover_gb": handover.received_bytes / 1e9}
        if finish_evaluation is not None:
            with self._timer.phase("testing", shown="evaluate"):
                found = {**finish_evaluation(), "val-aux/version": step}
            # The last row has the accuracy after it.
            if step + 1 < self._run.config.run.num_steps:
                metrics = {**metrics, **found}
        return metrics

    @property
    def _beside(self) -> FreeRunning | None:
        """The sampler that evaluates beside a step; None if the run stops for evaluations."""
        # Agents' evaluations share the slots too, but steps wait for them.
        return None if self._run.config.rollout.agent else self._sampling.free

    def evaluate(self, when: str) -> Metrics:
        """Accuracy on the evaluation prompts.

        A sampler that runs free does not stop for one during training: the next step has its metrics, which
        are those of the weights that it begins with.
        """
        if when == "during" and self._beside is not None:
            return {}
        self._sampling.generation.load_weights()
        with self._timer.phase("testing", shown="evaluate"):
            return dict(self._evaluation(self._roles.actor, when))

    def record(self) -> dict[str, Any]:
        """JSON-compatible state that a resumed run needs besides the learners' states."""
        return self._state.record() | {"sampling": self._sampling.sampler.record(self.prompts)}

    def close(self) -> None:
        """Waits for sampling and writing in progress; closes backend, graders and reward functions."""
        self._rollouts.close()
        self._sampling.close()
        self._functions.close()
        self._graders.close()
        self._roles.actor.close()
