"""Policy gradient without a critic: GRPO (arXiv 2402.03300), Dr. GRPO, RLOO, REINFORCE, REINFORCE++, GSPO.

They differ in the estimator behind `step.advantages` and the loss behind `step.actor.update`.
"""

from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step


@dataflow(roles=("actor", "reference", "reward"))
def grpo(step: Step, prompts: PromptSource) -> Metrics:
    """Advantages are rewards relative to the other responses to the same prompt."""
    batch = step.pack(step.sample(prompts))
    batch = step.reference.logprobs(step.actor.logprobs(batch))
    batch = step.advantages(batch)
    return batch.metrics | step.actor.update(batch)
