"""Makes JetStream's package importable; nothing else in this project imports it directly.

    package                  imports JetStream's modules and works around their problems
    engine_adapter           our engine as a `jetstream.engine.engine_api.Engine`
    orchestrator_driver      JetStream's own driver: threads for prefill, transfer, generate and detokenize
    jetstream_backend        a rollout backend on that driver; one host only
    serving.jetstream_grpc   JetStream's servicer and messages

JetStream is archived. Its last release, google-jetstream 0.2.2, was written for jax 0.4. These workarounds
make it run today:

    seqio, hence TensorFlow, is imported for tokenizers that we do not use    a stub during the import
    the root logger is set to DEBUG and prints to stdout                      restored after the import
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

Not covered: JetStream's driver has no settings per request, and its state always has full size.
`serving.online_driver` has neither limit. On several hosts JetStream's threads would dispatch in different
orders and hang.
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
    """Makes JetStream importable without TensorFlow and without side effects on logging."""
    if importlib.util.find_spec("jetstream") is None:
        raise UserError("JetStream is not installed; run pip install google-jetstream==0.2.2")
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


# gRPC registers fork handlers that check its file descriptors in every child. A child that closes all
# inherited descriptors, such as a sandboxed grader, would be aborted. None of our children use gRPC.
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
    """Frees the memory of a prefix after it was inserted."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


orchestrator.delete_pytree = _delete_arrays
orchestrator.logging = token_utils.logging = LOG
