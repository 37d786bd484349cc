"""A loop of tinker's SDK whose server is killed: prints losses and samples.

python killed_script.py URL
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


service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-local")
client = service.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4).result()
losses, samples = [], []
for step in range(8):
    sampler = client.save_weights_and_get_sampling_client().result()
    sampling = types.SamplingParams(max_tokens=16, seed=step, stop=[])
    answer = sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 4, sampling).result()
    samples.append([[each.tokens, each.logprobs] for each in answer.sequences])
    trained = client.forward_backward([datum(n) for n in (20, 7, 31)], "cross_entropy")
    stepped = client.optim_step(types.AdamParams(learning_rate=1e-2))
    losses.append([trained.result().metrics["loss:sum"], stepped.result().metrics])
client.save_state("last").result()
print(json.dumps([losses, samples]))
