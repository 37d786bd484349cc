"""Counts of a live loop in the text format of Prometheus."""

from jaxrl.rollout.live_loop import LiveCounts

MEDIA_TYPE = "text/plain; version=0.0.4"

# Field of the counts, name and type of the metric, help.
_METRICS = (
    ("waiting", "jaxrl_samples_waiting", "gauge", "Samples that wait for a slot."),
    ("running", "jaxrl_samples_running", "gauge", "Samples in the decode loop."),
    ("sampled", "jaxrl_sampled_tokens_total", "counter", "Tokens sampled."),
    ("prompt", "jaxrl_prompt_tokens_total", "counter", "Tokens of prompts."),
    ("known", "jaxrl_prompt_tokens_cached_total", "counter", "Tokens of prompts from known pages."),
)


def exposition(counts: LiveCounts) -> str:
    """The body of an answer to Prometheus."""
    return "".join(
        f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {getattr(counts, field)}\n"
        for field, name, kind, text in _METRICS
    )
