"""Processor seconds of training steps against a Tinker server, by the lengths of their texts.

    python benchmarks/tinker_step.py http://127.0.0.1:8000 MODEL PID[,PID]

Runs with any SDK of Tinker's that the server takes, so that two servers can be compared. PIDs are the
server's processes; their time is counted, since the wall clock of a shared machine says little. A step is a
forward_backward of 64 texts and an optim_step, of an adapter of rank 8. Lengths that a server has not seen
may compile, so each is measured twice in a row.
"""

import os
import sys
import time

import numpy as np
import tinker
from tinker import types

LENGTHS = ((25, 33), (45, 53), (90, 101))
TEXTS = 64


def main() -> None:
    url, model, pids = sys.argv[1:]
    processes = [int(pid) for pid in pids.split(",")]
    service = tinker.ServiceClient(base_url=url, api_key="tml-local")
    client = service.create_lora_training_client(base_model=model, rank=8)
    rng = np.random.default_rng(0)
    for low, high in LENGTHS:
        for _ in range(2):
            data = [datum(rng, int(n)) for n in rng.integers(low, high, TEXTS)]
            began, used = time.monotonic(), processor_seconds(processes)
            losses = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            losses.result()
            wall, used = time.monotonic() - began, processor_seconds(processes) - used
            tokens = sum(each.model_input.length for each in data)
            print(f"{low} to {high - 1}: {tokens} tokens, {wall:.1f} s, processor {used:.1f} s")


def datum(rng: np.random.Generator, length: int) -> types.Datum:
    """A text of random tokens, all of which are trained."""
    tokens = rng.integers(100, 1000, length + 1)
    inputs = {"target_tokens": tokens[1:].tolist(), "weights": [1.0] * length}
    text = types.ModelInput.from_ints(tokens[:-1].tolist())
    return types.Datum(model_input=text, loss_fn_inputs=inputs)


def processor_seconds(processes: list[int]) -> float:
    """Seconds that processes of this machine have computed."""
    ticks = 0
    for pid in processes:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
