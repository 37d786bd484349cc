"""A loss of the client's own by tinker's SDK, which needs torch: prints what each step's loss was.

python custom_loss.py URL
"""

import json
import sys

import numpy as np
import tinker
import torch
from tinker import types

rng = np.random.default_rng(0)


def datum(length: int) -> types.Datum:
    tokens = rng.integers(10, 250, length + 1).tolist()
    inputs = {"target_tokens": tokens[1:], "wanted": np.full(length, -4, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def loss(data, logprobs):
    """The squared distance of each log-probability from a wanted one."""
    wanted = [torch.tensor(each.loss_fn_inputs["wanted"].data) for each in data]
    total = sum(((x - y) ** 2).sum() for x, y in zip(logprobs, wanted, strict=True))
    return total, {"distance": float(total)}


service = tinker.ServiceClient(base_url=sys.argv[1], api_key="tml-local")
client = service.create_lora_training_client(base_model="Qwen/Qwen3-8B", rank=4).result()
data = [datum(n) for n in (20, 7, 31)]
losses = []
for _ in range(3):
    trained = client.forward_backward_custom(data, loss).result()
    losses.append(trained.metrics["loss:sum"])
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
print(json.dumps(losses))
