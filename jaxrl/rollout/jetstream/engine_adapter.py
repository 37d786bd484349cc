"""Adapts our engine to JetStream's contract, `jetstream.engine.engine_api.Engine`.

W tokens of a dispatch   n slots   C columns per token
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.mesh.rules import replicated
from jaxrl.models.decoder import Params
from jaxrl.rollout.decode_state import DecodeState, Prefix
from jaxrl.rollout.engine import Engine, host_inputs
from jaxrl.rollout.jetstream.package import engine_api, tokenizer_api, tokenizer_pb2
from jaxrl.rollout.slots import DrawSettings, SlotAssignment, insert, prefilled, settings_on_device


@dataclasses.dataclass(frozen=True)
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
    """Keys and values of a prompt, and its request; the fields are those of `Work`."""

    prefix: Prefix
    max_tokens: int = dataclasses.field(metadata={"static": True})
    prompt_id: int = dataclasses.field(metadata={"static": True})
    first_sample: int = dataclasses.field(metadata={"static": True})


class JetstreamTokenizer(tokenizer_api.Tokenizer):
    """Wraps an encode and a decode function as JetStream's tokenizer. It neither pads nor adds tokens."""

    def __init__(
        self,
        encode_text: Callable[[str], np.ndarray],
        decode_text: Callable[[np.ndarray], str],
        stop_ids: Sequence[int],
    ):
        self._encode_text = encode_text
        self.decode_text = decode_text
        self._stop_ids = tuple(stop_ids)

    def encode(self, s: str, **kwargs) -> tuple[np.ndarray, int]:
        """Token ids, int32 [T], and T. JetStream's padding arguments are ignored."""
        tokens = self._encode_text(s)
        return tokens, len(tokens)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        """The text of `token_ids`."""
        return self.decode_text(np.asarray(token_ids, np.int32))

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end a response and are not part of the output."""
        return set(self._stop_ids)

    @property
    def pad_id(self) -> int:
        """Id of padding; the model never sees it."""
        return 0

    @property
    def eos_id(self) -> int:
        """The first of the stop ids, 0 if there is none."""
        return next(iter(self._stop_ids), 0)

    @property
    def bos_id(self) -> int:
        """Not used: BOS, if any, is already part of the prompt."""
        return self.eos_id


class JetStreamEngine(engine_api.Engine):
    """Our engine under JetStream's contract. A dispatch returns up to W tokens, JetStream's "speculations".

    One of JetStream's slots stands for `samples_per_slot` consecutive slots of ours, all with the same
    prompt. With `columns` each token is followed by the bits of float values of the state, so that they reach
    the host with it. Such bits can look like a stop id. The tokenizer must then have no stop ids, and a
    sample ends where no entry is valid.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        tokenizer: JetstreamTokenizer,
        settings: DrawSettings,
        *,
        samples_per_slot: int = 1,
        columns: Sequence[str] = (),
        lock: contextlib.AbstractContextManager | None = None,
    ):
        """Makes the adapter. Device memory for the decode state is first taken by `insert`.

        Args:
          engine, params, tokenizer: engine, weights and tokenizer of the model.
          settings: sampling settings of all requests.
          samples_per_slot: number of our slots per JetStream slot; divides the number of our slots.
          columns: names of float32 fields of `DecodedTokens` that accompany the tokens.
          lock: context manager that is held during each dispatch. It is needed if another driver uses the
            devices, and on a mesh because JetStream dispatches from several threads: all devices must get
            their programs in the same order.
        """
        assert engine.pages is None, "JetStream assigns slots, and nobody would assign their pages"
        self.engine = engine
        self.tokenizer = tokenizer
        self._params = params
        self._settings = settings_on_device(engine, settings)
        self._samples_per_slot = samples_per_slot
        self._columns = tuple(columns)
        self._lock = threading.Lock() if lock is None else lock
        self._packed = jax.jit(self._pack)
        (self._none_active,) = host_inputs(engine.mesh, np.int32(0))

    def load_params(self, *args, **kwargs) -> Params:
        """The weights given to the constructor."""
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
            prefix = prefilled(self.engine, params, [work.tokens])
        return WorkPrefix(prefix, work.max_tokens, work.prompt_id, work.first_sample)

    def insert(
        self, prefix: WorkPrefix, decode_state: DecodeState | None, slot: int
    ) -> DecodeState:
        """Starts a request's samples in a slot."""
        first = slot * self.samples_per_slot
        assignments = [
            SlotAssignment(
                first + k, 0, prefix.prompt_id, prefix.first_sample + k, prefix.max_tokens
            )
            for k in range(self.samples_per_slot)
        ]
        with self._lock:
            state = self.engine.init_decode_state() if decode_state is None else decode_state
            return insert(self.engine, prefix.prefix, state, assignments, self._settings)

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
        """The tokenizer given to the constructor."""
        return self.tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        """The number of JetStream's slots."""
        return self.engine.slot_sizes[-1] // self.samples_per_slot

    @property
    def samples_per_slot(self) -> int:
        """The number of our slots per JetStream slot."""
        return self._samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        """The maximum number of prompt tokens."""
        return self.engine.max_prefill_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The devices of the engine."""
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """Not supported."""
        return None
