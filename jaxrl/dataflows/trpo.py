"""TRPO (Schulman et al. 2015, arXiv 1502.05477, algorithm 1): natural gradient, step of a given KL."""

from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step


@dataflow(roles=("actor", "critic", "reward"), trust_region=True)
def trpo(step: Step, prompts: PromptSource) -> Metrics:
    """Advantages over the critic's values; the largest step inside the trust region, from the whole batch."""
    batch = step.actor.logprobs(step.pack(step.sample(prompts)))
    batch, targets = step.advantages.with_values(batch, step.critic.values(batch))
    return batch.metrics | step.critic.update(targets) | step.actor.update(batch)
