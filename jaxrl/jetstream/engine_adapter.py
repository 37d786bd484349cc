"""Our engine under JetStream's contract, `jetstream.engine.engine_api.Engine`.

JetStream is archived; the contract is kept, not followed. Its last release, google-jetstream 0.2.2, was
written for jax 0.4. Only this file imports the package, with these workarounds:

    seqio, hence TensorFlow, is imported for tokenizers that we do not use    a stub during the import
    the root logger is set to DEBUG and prints to stdout                      restored after the import
    `logging.info` on every step, which installs handlers by itself           a logger of its own
    `jax.tree_map` is gone from jax                                           a `delete_pytree` of ours
    an exception in a thread is answered with SIGKILL                         `JetStreamDriver._guarded`
    stopping leaves callers waiting for ever                                  `JetStreamDriver.stop`
    BOS is put before every prompt                                            `_process_prefill_content`
    prompts are padded to a fixed list of sizes, longer ones cut              the same
    `max_tokens` is checked per dispatch, not per token                       the engine's own limit

Not covered: JetStream's driver has no settings per request, and its state always has full size. On several
hosts its threads would dispatch in different orders and hang.

    W tokens of a dispatch   n slots   C columns per token
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.errors import UserError
from jaxrl.mesh.rules import replicated
from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_state import DecodeState, Prefix
from jaxrl.rollout.engine import Engine, host_inputs
from jaxrl.rollout.samples import Sample, Start
from jaxrl.rollout.sampling import SamplingOptions
from jaxrl.rollout.slots import insert, prefilled, settings_on_device


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
        # Others that look for seqio must not find a stub.
        for name in stubs:
            del sys.modules[name]
        root.setLevel(level)
        root.handlers[:] = handlers


# JetStream imports gRPC, which registers fork handlers that check its file descriptors in every child. A
# child that closes all inherited descriptors, such as a sandboxed grader, would be aborted.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
with _importable():
    from jetstream.core import orchestrator
    from jetstream.core.utils.return_sample import ReturnSample
    from jetstream.engine import engine_api, token_utils, tokenizer_api, tokenizer_pb2

__all__ = ["LOG", "JetStreamEngine", "ReturnSample", "Work", "orchestrator", "tokenizer_api"]

LOG = logging.getLogger("jetstream")


# Frees the memory of a prefix after it was inserted.
orchestrator.delete_pytree = lambda tree: [leaf.delete() for leaf in jax.tree.leaves(tree)]
orchestrator.logging = token_utils.logging = LOG


@dataclasses.dataclass(frozen=True, eq=False)
class Work:
    """A prompt and the settings of its request.

    Attributes:
      tokens: int32 [T].
      max_tokens: maximum number of tokens per sample.
      prompt_id: part of the sampling keys.
      first_sample: index of the first sample; the others follow.
    """

    tokens: np.ndarray
    max_tokens: int
    prompt_id: int = 0
    first_sample: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkPrefix:
    """Keys and values of a prompt, and its request."""

    prefix: Prefix
    # Static, since arrays on the host and numbers are no leaves. It is compared by identity.
    work: Work = dataclasses.field(metadata={"static": True})


class JetstreamTokenizer(tokenizer_api.Tokenizer):
    """Wraps an encode and a decode function as JetStream's tokenizer. It neither pads nor adds tokens."""

    # The model never sees padding, and BOS, if any, is already part of the prompt.
    pad_id = bos_id = eos_id = 0  # pyright: ignore
    stop_tokens: set[int] = frozenset()  # pyright: ignore

    def __init__(
        self,
        encode_text: Callable[[str], np.ndarray] | None,
        decode_text: Callable[[np.ndarray], str],
        stop_ids: Sequence[int],
    ):
        self._encode_text, self._decode_text = encode_text, decode_text
        self.stop_tokens = set(stop_ids)  # pyright: ignore

    def encode(self, s: str, **kwargs) -> tuple[np.ndarray, int]:
        """Token ids, int32 [T], and T. JetStream's padding arguments are ignored."""
        assert self._encode_text is not None, "rollouts begin with tokens, not with texts"
        tokens = self._encode_text(s)
        return tokens, len(tokens)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        return self._decode_text(np.asarray(token_ids, np.int32))


class JetStreamEngine(engine_api.Engine):
    """Our engine under JetStream's contract. A dispatch returns up to W tokens, JetStream's "speculations".

    One of JetStream's slots stands for `samples_per_slot` consecutive slots of ours, all with the same
    prompt. With `columns`, log-probability and entropy travel as extra integer columns beside each token.
    Such bits can look like a stop id. The tokenizer must then have no stop ids, and a sample ends where no
    entry is valid.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        tokenizer: JetstreamTokenizer,
        options: SamplingOptions,
        *,
        samples_per_slot: int = 1,
        columns: Sequence[str] = (),
    ):
        """Makes the adapter. Device memory for the decode state is first taken by `insert`.

        Args:
          engine, params, tokenizer: engine, weights and tokenizer of the model.
          options: how tokens of all requests are drawn.
          samples_per_slot: number of our slots per JetStream slot; divides the number of our slots.
          columns: names of float32 fields of `DecodedTokens` that accompany the tokens.
        """
        assert engine.pages is None, "JetStream assigns slots, but not their pages"
        self.engine = engine
        self.tokenizer = tokenizer
        self._params = params
        self._options = options
        self._settings = settings_on_device(engine, options)
        self._samples_per_slot = samples_per_slot
        self._columns = tuple(columns)
        # JetStream dispatches from several threads, and all devices of a mesh must get their programs in the
        # same order.
        self._lock = threading.Lock()
        self._packed = jax.jit(self._pack)
        (self._none_active,) = host_inputs(engine.mesh, np.int32(0))

    def load_params(self, *args, **kwargs) -> Params:
        return self._params

    def init_decode_state(self, *args, **kwargs) -> DecodeState | None:
        """None: `insert` allocates the state when it is needed."""
        return None

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: WorkPrefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> WorkPrefix:
        """Computes the keys and values of one prompt.

        Args:
          params: the weights.
          existing_prefix: always None; JetStream's driver does not use it.
          padded_tokens: int [T'], padded on the right, or a `Work`.
          true_length: T, number of real tokens; not used for a `Work`.
        """
        assert existing_prefix is None, "prefixes are not extended"
        work = padded_tokens
        if not isinstance(work, Work):
            tokens = np.asarray(padded_tokens, np.int32)[:true_length]
            work = Work(tokens, self.engine.config.max_response_tokens)
        with self._lock:
            return WorkPrefix(prefilled(self.engine, params, [Start(work.tokens)]), work)

    def insert(
        self, prefix: WorkPrefix, decode_state: DecodeState | None, slot: int
    ) -> DecodeState:
        """Starts a request's samples in a slot."""
        work, options = prefix.work, self._options
        starts = []
        for k in range(self.samples_per_slot):
            sample = Sample(0, work.first_sample + k, options.step)
            sample.request(Start(work.tokens), work.prompt_id, options, work.max_tokens)
            starts.append((slot * self.samples_per_slot + k, 0, sample))
        with self._lock:
            state = self.engine.init_decode_state() if decode_state is None else decode_state
            return insert(self.engine, prefix.prefix, state, starts, self._settings)

    def generate(
        self, params: Params, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Decodes up to W tokens in every active slot."""
        with self._lock:
            state = self.engine.generate(params, decode_state, self._none_active)
            data = self._packed(state)
        tokens = self.engine.config.tokens_per_dispatch * (1 + len(self._columns))
        return state, engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, tokens),
            valid_idx=(tokens, 2 * tokens),
            length_idx=(2 * tokens, 2 * tokens + 1),
            samples_per_slot=self.samples_per_slot,
        )

    def _pack(self, state: DecodeState) -> jax.Array:
        """Joins tokens, validity and lengths to int32 [n, 2 * W * C + 1], for a single copy to the host."""
        decoded = state.decoded
        bits = [
            jax.lax.bitcast_convert_type(getattr(decoded, name), jnp.int32)
            for name in self._columns
        ]
        token_nWC = jnp.stack([decoded.token, *bits], axis=-1)
        n, W, _ = token_nWC.shape
        # A dispatch draws fewer than W tokens in a slot whose sample ends.
        valid_nW1 = (jnp.arange(W)[None] < decoded.count[:, None])[..., None]
        valid_nWC = jnp.broadcast_to(valid_nW1, token_nWC.shape).astype(jnp.int32)
        parts = (token_nWC.reshape(n, -1), valid_nWC.reshape(n, -1), state.count[:, None])
        return jnp.concatenate(parts, axis=1)

    def get_prefix_destination_sharding(self) -> Any:
        """The sharding of a prefix before it is inserted."""
        return replicated(self.engine.mesh)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:  # pyright: ignore
        """An empty message: `build_tokenizer` needs no file."""
        return tokenizer_pb2.TokenizerParameters()  # pyright: ignore

    def build_tokenizer(self, metadata: Any) -> JetstreamTokenizer:
        return self.tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        return self.engine.slot_sizes[-1] // self.samples_per_slot

    @property
    def samples_per_slot(self) -> int:
        """The number of our slots per JetStream slot."""
        return self._samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        return self.engine.config.max_prompt_tokens

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        return None
