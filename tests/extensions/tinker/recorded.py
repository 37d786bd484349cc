"""A client that sends bodies as recorded with tinker 0.38 and its cookbook, and a server for it."""

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
import types
from typing import Any

import jax
import numpy as np
from byte_engine import random_weights
from extras import import_extra
from processes import free_port, started

for package in ("google.protobuf", "starlette", "uvicorn"):
    import_extra("dev", package)

from jaxrl.data.tokenizer import train_tokenizer  # noqa: E402
from jaxrl.models.huggingface.weight_export import save_checkpoint  # noqa: E402
from jaxrl.models.model_config import ModelConfig  # noqa: E402
from jaxrl_tinker.devices import Together  # noqa: E402
from jaxrl_tinker.futures import Futures  # noqa: E402
from jaxrl_tinker.models import Models  # noqa: E402
from jaxrl_tinker.settings import TinkerConfig  # noqa: E402
from jaxrl_tinker.wire import MESSAGES, parse, tensor_of  # noqa: E402

ROOT = pathlib.Path(__file__).parents[3]
PROTOBUF, JSON = "application/x-protobuf", "application/json"
PROMPT = [5, 6, 7]
# Few sizes, so that little is compiled.
SIZES = {
    "slots": 8,
    "prefill_prompts": 1,
    "max_prompt_tokens": 24,
    "max_response_tokens": 8,
    "tokens_per_dispatch": 4,
    "train_tokens": 32,
    "train_microbatches": 4,
    "max_rank": 4,
}
NO_CLIPPING = {"grad_clip_norm": 0.0}
SESSION = {
    "tags": [],
    "user_metadata": {"recipe_name": "recipe_rl_loop", "git_rev": "0.6.1"},
    "sdk_version": "0.38.0",
    "display_name": "cookbook-rl-loop",
    "type": "create_session",
}


def write_model(root: pathlib.Path, **changes) -> pathlib.Path:
    """A random model of two layers in `root`/tiny."""
    tokenizer = train_tokenizer(["one two three four: 12 + 30 = 42"] * 4, vocab_size=280)
    tokenizer.save(root / "tokenizer")
    sizes = {"num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, **changes}
    model = ModelConfig(vocab_size=288, d_model=16, d_ff=32, **sizes)
    params = jax.device_put(random_weights(model))
    save_checkpoint(params, model, root / "tiny", dtype="float32", source=root / "tokenizer")
    return root


def config_of(folder: pathlib.Path, /, **changes) -> TinkerConfig:
    given = {
        "name": "Qwen/Qwen3-8B",
        "folder": str(folder / "saved"),
        "http_port": 0,
        "max_body_bytes": 100_000,
        "adapters": 2,
        **SIZES,
    }
    return TinkerConfig(model=str(folder / "tiny"), **{**given, **changes})


class Server:
    """`jaxrl serve --tinker` in processes of its own, which share the work."""

    def __init__(
        self, folder: pathlib.Path, saved: pathlib.Path, *switches: str, processes=1, **changes
    ):
        self.port = free_port()
        self.saved = saved
        self.processes: list[subprocess.Popen] = []
        flags = {"model": folder / "tiny", "folder": saved, "port": self.port, **SIZES}
        flags |= {"name": "Qwen/Qwen3-8B", "checkpoint_steps": 2, **changes}
        self._running = contextlib.ExitStack()
        command = [sys.executable, "-m", "jaxrl", "serve", "--tinker", *switches]
        for name, value in flags.items():
            command += [f"--{name}", str(value)]
        self._commands = [command]
        if processes > 1:
            address = ["--coordinator", f"localhost:{free_port()}"]
            address += ["--num_processes", str(processes), "--process_id"]
            self._commands = [[*command, *address, str(i)] for i in range(processes)]
        self.start()

    def start(self):
        devices = f"--xla_force_host_platform_device_count={4 // len(self._commands)}"
        env = {**os.environ, "JAX_PLATFORMS": "cpu"}
        if len(self._commands) > 1:
            env["XLA_FLAGS"] = devices
        self.processes = self._running.enter_context(started(self._commands, cwd=ROOT, env=env))

    def kill(self):
        self._running.close()

    def ids(self, kind: str) -> set[str]:
        """The ids of all complete records of a kind."""
        lines = (self.saved / "log.jsonl").read_bytes().split(b"\n")[:-1]
        return {record["id"] for record in map(json.loads, lines) if record["kind"] == kind}


class Client:
    """Sends bodies as they are, and fetches results as the SDK does."""

    def __init__(self, port: int):
        self.port = port

    def send(self, route, body, *, kind=JSON, method="POST", **headers):
        """(status, answer): JSON, or bytes in protobuf."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, f"/api/v1/{route}", content, {"content-type": kind, **headers})
        answer = connection.getresponse()
        found = answer.read()
        kind = answer.getheader("content-type")
        connection.close()
        return answer.status, found if kind == PROTOBUF else json.loads(found)

    def post(self, route, body, **options):
        status, answer = self.send(route, body, **options)
        assert status == 200, answer
        return answer

    def result(self, submitted):
        asked = {"request_id": submitted["request_id"], "allow_metadata_only": True}
        while True:
            status, answer = self.send("retrieve_future", asked)
            if status != 408:
                assert status == 200, answer
                return answer
            pending = {"type": "try_again", "queue_state": "active"}
            assert answer == {**pending, "request_id": asked["request_id"]}

    def future(self, route, body, **options):
        return self.result(self.post(route, body, **options))


class Trainer(Client):
    """A client with a session and a model."""

    def __init__(self, port: int, rank: int = 4, **lora_config):
        super().__init__(port)
        self.session_id = self.post("create_session", SESSION)["session_id"]
        self.seq_id = 0
        self.samplers = 0
        parts = dict.fromkeys(("train_unembed", "train_mlp", "train_attn"), True)
        create = {
            "model_seq_id": 0,
            "lora_config": {"rank": rank, **parts, **lora_config},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        created = self.future("create_model", self.of_base() | create)
        assert created == {"model_id": f"{self.session_id}:train:0", "type": "create_model"}
        self.model_id = created["model_id"]

    def of_base(self) -> dict:
        """The session and the base model, which several bodies name."""
        return {"session_id": self.session_id, "base_model": "Qwen/Qwen3-8B"}

    def next(self) -> int:
        self.seq_id += 1
        return self.seq_id

    def batch(self, data, loss="cross_entropy", seq_id=None, **fields) -> bytes:
        """A ForwardBackwardRequest; a datum is (tokens, {name: array})."""
        message = MESSAGES["ForwardBackwardRequest"](
            model_id=self.model_id, seq_id=seq_id or self.next(), loss_fn=loss, **fields
        )
        for tokens, inputs in data:
            datum = message.data.add()
            # A prompt comes as a dozen chunks.
            for part in np.array_split(np.array(tokens, "<i4"), 2):
                datum.model_input.add().encoded_text.tokens = part.tobytes()
            for name, values in inputs.items():
                datum.loss_fn_inputs[name].CopyFrom(tensor_of(values))
        return message.SerializeToString()

    def train(self, data, loss="cross_entropy", **fields):
        """(log-probabilities of each datum, metrics)."""
        body = self.batch(data, loss, **fields)
        return decoded(self.future("forward_backward", body, kind=PROTOBUF))

    def call(self, route, **fields):
        body = {"model_id": self.model_id, "seq_id": self.next(), "type": route, **fields}
        return self.future(route, body)

    def step(self, learning_rate=1e-2):
        adam = {"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-08}
        return self.call("optim_step", adam_params={**adam, "weight_decay": 0.0, **NO_CLIPPING})

    def snapshot(self, kind="snapshot") -> str:
        """A new sampler of the weights as they are."""
        number, self.samplers = self.samplers, self.samplers + 1
        saved = self.call("save_weights_for_sampler", sampling_session_seq_id=number, kind=kind)
        assert saved["path"] is None
        return saved["sampling_session_id"]

    def go_on(self, loaded):
        """Trains the model of the answer to a create_model or load_weights."""
        self.model_id, self.seq_id = loaded["model_id"], 0

    def sample(self, sampler, seq_id=0, *, num_samples=2, **fields):
        body = asked(sampler, seq_id, num_samples=num_samples, **fields)
        submitted = self.post("asample", body)
        ids = submitted["sample_sequence_ids"]
        assert ids == [f"{submitted['request_id']}/{i}" for i in range(num_samples)]
        found = self.result(submitted)
        return parse("SampleResponse", found) if isinstance(found, bytes) else found


class Patient(Trainer):
    """Asks again, as the SDK does, while there is no server."""

    def send(self, *arguments, **options):
        end = time.monotonic() + 120
        while True:
            try:
                return super().send(*arguments, **options)
            except (OSError, http.client.HTTPException):
                assert time.monotonic() < end, "the server does not come back"
                time.sleep(0.1)


def finish(*clients):
    for client in clients:
        client.post(f"sessions/{client.session_id}/finish", {})


def asked(sampler, seq_id, *, prompt=PROMPT, num_samples=2, params=(), **fields):
    """The body of `asample`."""
    plain = {"max_tokens": 6, "stop": [], "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    return {
        "num_samples": num_samples,
        "prompt": {"chunks": [{"tokens": [t], "type": "encoded_text"} for t in prompt]},
        "sampling_params": {**plain, **dict(params)},
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
        **fields,
    }


def models_alone(futures: Futures, folder: pathlib.Path, **options) -> Models:
    """The thread of training calls without a policy, for work that needs none."""
    unused: Any = types.SimpleNamespace(drop=lambda model_ids: None)
    together = Together(unused, exclusive=False)
    given = {"write": lambda *_, **__: None, "held": set, **options}
    return Models(together, futures, folder, **given)


def result_of(futures: Futures, future, timeout_s=20.0):
    """What a future comes to, from JSON; None if it is still pending."""
    found = asyncio.run(futures.retrieve(future.request_id, timeout_s))
    return None if found is None else json.loads(found.body)


def decoded(body):
    """(log-probabilities of each datum, metrics), or an error as it is."""
    if not isinstance(body, bytes):
        return body
    output = parse("ForwardBackwardOutput", body)
    logprobs = []
    for record in output.loss_fn_outputs:
        found = record.fields["logprobs"]
        ends = np.frombuffer(found.offsets, "<i8") // 4
        flat = np.frombuffer(found.data, "<f4")
        logprobs += [flat[a:b] for a, b in itertools.pairwise(ends)]
    return logprobs, dict(output.metrics)


def sampled(sequence):
    return np.frombuffer(sequence.tokens, "<i4").tolist(), np.frombuffer(sequence.logprobs, "<f4")


def supervised(tokens):
    tokens = np.array(tokens)
    ones = np.ones(len(tokens) - 1, np.float32)
    return tokens[:-1], {"target_tokens": tokens[1:], "weights": ones}


DATA = [supervised(x) for x in ([3, 4, 5, 6, 7], [9, 8, 7], list(range(10, 42)))]
