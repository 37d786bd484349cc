"""Vanilla policy gradient: REINFORCE (Williams 1992) with the reward to go and a learned baseline.

The policy gradient theorem (Sutton et al. 2000), with G_t the reward that is still to come:

    grad J = E[sum over t of grad log pi(a_t | s_t) (G_t - V(s_t))]
"""

from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step


@dataflow(roles=("actor", "critic", "reward"))
def vpg(step: Step, prompts: PromptSource) -> Metrics:
    """A regression of the values onto the rewards to go, and one step along the gradient."""
    batch = step.actor.logprobs(step.pack(step.sample(prompts)))
    batch, targets = step.advantages.with_values(batch, step.critic.values(batch))
    return batch.metrics | step.critic.update(targets) | step.actor.update(batch)
