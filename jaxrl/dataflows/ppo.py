"""PPO (arXiv 1707.06347) with a critic and a reference policy: HybridFlow's Figure 6, first dataflow."""

from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step


@dataflow(roles=("actor", "critic", "reference", "reward"))
def ppo(step: Step, prompts: PromptSource) -> Metrics:
    """Rewards minus the KL penalty, generalised advantages over the critic's values, two updates."""
    batch = step.pack(step.sample(prompts))
    batch = step.reference.logprobs(step.actor.logprobs(batch))
    batch, targets = step.advantages.with_values(batch, step.critic.values(batch))
    return batch.metrics | step.critic.update(targets) | step.actor.update(batch)
