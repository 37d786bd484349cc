"""Safe RLHF (arXiv 2310.12773): PPO with a cost model, its critic, and a Lagrange multiplier.

HybridFlow's Figure 6, second dataflow.
"""

from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step


@dataflow(roles=("actor", "critic", "reference", "reward", "cost", "cost_critic"))
def safe_rlhf(step: Step, prompts: PromptSource) -> Metrics:
    """PPO on rewards minus costs; the actor's update includes the auxiliary (ptx) loss."""
    sampled = step.sample(prompts)
    costs = step.cost.score(sampled)
    batch = step.pack(sampled)
    batch = step.reference.logprobs(step.actor.logprobs(batch))
    batch, targets = step.advantages.with_values(batch, step.critic.values(batch))
    batch, cost_targets = step.advantages.with_costs(batch, costs, step.cost_critic.values(batch))
    # After the advantages, which have the multiplier of this step.
    metrics = batch.metrics | step.multiplier.update(costs)
    metrics |= step.critic.update(targets) | step.cost_critic.update(cost_targets)
    return metrics | step.actor.update(batch)
