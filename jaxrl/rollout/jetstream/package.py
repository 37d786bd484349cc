"""JetStream's package, made importable; nothing else in this project imports it.

    package                  what is taken of it, and what it takes to run it today
    engine_adapter           our engine as a `jetstream.engine.engine_api.Engine`
    orchestrator_driver      JetStream's own driver: threads for prefill, transfer, generate and detokenize
    jetstream_backend        a rollout backend, driven by that driver; one host only
    serving.jetstream_grpc   JetStream's servicer and messages

JetStream is archived: google-jetstream 0.2.2 is its last release and was written for jax 0.4. All that it
takes to run it is in these files, each with its reason:

    seqio, hence TensorFlow, is imported for tokenizers that we do not use    a stub, while importing
    the root logger is set to DEBUG and prints to stdout                      put back after importing
    `logging.info` on every step, which installs handlers by itself           a logger of its own
    `jax.tree_map` is gone from jax                                           `_delete_arrays`
    an exception in a thread is answered with SIGKILL                         `JetStreamDriver._guarded`
    stopping leaves callers waiting for ever                                  `JetStreamDriver.stop`
    BOS is put before every prompt                                            `_process_prefill_content`
    prompts are padded to a fixed list of sizes, longer ones cut              the same
    `max_tokens` is checked per dispatch, not per token                       the engine's own limit
    tokens are turned into text one by one, which breaks characters           `jetstream_grpc._Texts`
    cancelled requests decode to their end                                    `JetStreamDriver._pass_on`
    the server listens on all interfaces, on a port that it does not report   `GrpcServer`

Not covered: JetStream's driver knows no settings per request, and keeps a state of full size; for both see
`serving.online_driver`. On several hosts its threads would dispatch in different orders and hang.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import jax

from jaxrl.errors import UserError


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """JetStream can be imported: without TensorFlow, and without side effects on logging."""
    if importlib.util.find_spec("jetstream") is None:
        raise UserError(
            "JetStream is not installed; install jaxrl with its extra: pip install 'jaxrl[jetstream]'"
        )
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    stubs: dict[str, types.ModuleType] = {}
    if "seqio" not in sys.modules:
        vocabularies: Any = types.ModuleType("seqio.vocabularies")
        vocabularies.Vocabulary = type("Vocabulary", (), {})
        vocabularies.SentencePieceVocabulary = vocabularies.Vocabulary
        stubs = {"seqio": types.ModuleType("seqio"), "seqio.vocabularies": vocabularies}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]
        root.setLevel(level)
        root.handlers[:] = handlers


# A process that closes what it has inherited, as that of a grader in a sandbox, would be aborted by gRPC,
# which looks after its own in every child. None of ours goes on with gRPC.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
with _importable():
    import grpc
    from jetstream.core import orchestrator
    from jetstream.core.proto import jetstream_pb2_grpc
    from jetstream.core.utils.return_sample import ReturnSample
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

__all__ = [
    "LOG",
    "ReturnSample",
    "engine_api",
    "grpc",
    "jetstream_pb2_grpc",
    "orchestrator",
    "tokenizer_api",
    "tokenizer_pb2",
]

LOG = logging.getLogger("jetstream")


def _delete_arrays(tree: Any) -> None:
    """Frees the memory of a prefix that has been inserted."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


orchestrator.delete_pytree = _delete_arrays
orchestrator.logging = token_utils.logging = LOG
