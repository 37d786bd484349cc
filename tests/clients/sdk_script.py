"""A script of a user of tinker's SDK: trains, saves, samples, resumes. Prints what a test compares.

python sdk_script.py URL
"""

import json
import sys

import numpy as np
import tinker
from tinker import types

rng = np.random.default_rng(0)


def datum(length: int) -> types.Datum:
    tokens = rng.integers(10, 250, length + 1).tolist()
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * length}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def logprobs_of(client, tokens: list[int]) -> np.ndarray:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    given = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
    found = client.forward([given], "cross_entropy").result()
    return np.array(found.loss_fn_outputs[0]["logprobs"].data)


service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-local")
client = service.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4).result()

data = [datum(int(n)) for n in rng.integers(5, 60, 8)]
losses = []
for _ in range(5):
    trained = client.forward_backward(data, "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append(trained.result().metrics["loss:sum"])
    stepped.result()

saved = client.save_state("first").result().path
sampler = client.save_weights_and_get_sampling_client().result()
prompt = [5, 6, 7]
sampling = types.SamplingParams(max_tokens=8, temperature=0.7, stop=[])
answer = sampler.sample(types.ModelInput.from_ints(prompt), 4, sampling).result()
sequence = answer.sequences[0]
whole = [*prompt, *sequence.tokens]
trainer = logprobs_of(client, whole)
sampled = np.array(sequence.logprobs)
scored = sampler.compute_logprobs(types.ModelInput.from_ints(whole)).result()
one = types.SamplingParams(max_tokens=1)
drawn = sampler.sample(types.ModelInput.from_ints(whole), 1, one, prompt_alt_tokens_k=2).result()
ids, of_ids = (
    np.array(x.data).reshape(x.shape)
    for x in (drawn.prompt_alt_tokens.tokens, drawn.prompt_alt_tokens.logprobs)
)
of_drawn = logprobs_of(client, [*whole[:-1], int(ids[-1, 0])])

# More than the SDK sends at once: the second chunk arrives before the first.
many = client.forward_backward([datum(int(n)) for n in rng.integers(1, 20, 1025)], "cross_entropy")
client.optim_step(types.AdamParams(learning_rate=1e-2)).result()

refused = ""
try:
    client.forward_backward(data, "stable_reinforce").result()
except tinker.RequestFailedError as error:
    refused = str(error)

resumed = service.create_training_client_from_state_with_optimizer(saved).result()
again = logprobs_of(resumed, whole)
named = resumed.save_weights_for_sampler("named").result().path
by_name = service.create_sampling_client(model_path=named).result()
of_name = by_name.compute_logprobs(types.ModelInput.from_ints(whole)).result()

print(
    json.dumps(
        {
            "losses": losses,
            "samples": [len(s.tokens) for s in answer.sequences],
            "outputs": len(many.result().loss_fn_outputs),
            "refused": refused,
            "differences": {
                "drawn": float(abs(of_ids[-1, 0] - of_drawn[-1])),
                "sampler": float(np.abs(sampled - trainer[2:]).max()),
                "prompt": float(np.abs(np.array(scored[1:]) - trainer).max()),
                "resumed": float(np.abs(again - trainer).max()),
                "named": float(np.abs(np.array(of_name[1:]) - trainer).max()),
            },
        }
    )
)
