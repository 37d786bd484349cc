"""DAPO (Decoupled Clip and Dynamic Sampling Policy Optimisation), Algorithm 1 of arXiv 2503.14476."""

from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step


@dataflow(roles=("actor", "reward"), dynamic_sampling=True)
def dapo(step: Step, prompts: PromptSource) -> Metrics:
    """Samples groups with both right and wrong answers (eq. 11); advantages are relative to the group."""
    # Dynamic sampling is in the sampler (eq. 11), the soft overlong punishment in its rewards (eq. 13).
    batch = step.actor.logprobs(step.pack(step.sample(prompts)))
    batch = step.advantages(batch)
    # Clip-higher and the token-level mean are in the loss of the update.
    return batch.metrics | step.actor.update(batch)
