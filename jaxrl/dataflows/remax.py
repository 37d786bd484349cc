"""ReMax (arXiv 2310.10505): PPO without a critic, with the greedy answer's reward as the baseline."""

from jaxrl.dataflows.dataflow import dataflow
from jaxrl.dataflows.experience import Metrics
from jaxrl.dataflows.samplers import PromptSource
from jaxrl.dataflows.step import Step


@dataflow(roles=("actor", "reference", "reward"), greedy_baseline=True)
def remax(step: Step, prompts: PromptSource) -> Metrics:
    """Advantages are rewards minus the reward of the greedy response to the same prompt."""
    sampled = step.sample(prompts)
    # Before the packing and log-probabilities, for which the sampler's weights may have to go.
    greedy = step.greedy(sampled.completions.prompts)
    batch = step.pack(sampled)
    batch = step.reference.logprobs(step.actor.logprobs(batch))
    batch = step.advantages.with_baseline(batch, greedy)
    return batch.metrics | step.actor.update(batch)
