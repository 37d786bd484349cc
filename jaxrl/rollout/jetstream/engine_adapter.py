"""Our engine as JetStream's contract has it, `jetstream.engine.engine_api.Engine`.

W tokens of a dispatch   n slots   C columns of a token
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
    """A prompt and what else the engine should know of its request.

    Attributes:
      tokens: int32 [T].
      max_tokens: of each sample.
      prompt_id: enters the samples' keys.
      first_sample: index of the first of the samples; the others follow.
    """

    tokens: np.ndarray
    max_tokens: int
    prompt_id: int = 0
    first_sample: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WorkPrefix:
    """Keys and values of a prompt, and its request; fields as of `Work`."""

    prefix: Prefix
    max_tokens: int = dataclasses.field(metadata={"static": True})
    prompt_id: int = dataclasses.field(metadata={"static": True})
    first_sample: int = dataclasses.field(metadata={"static": True})


class Tokenizer(tokenizer_api.Tokenizer):
    """Two functions as JetStream's tokenizer. It neither pads nor adds tokens."""

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
        """Token ids, int32 [T], and T; how JetStream would pad them is ignored."""
        tokens = self._encode_text(s)
        return tokens, len(tokens)

    def decode(self, token_ids: list[int], **kwargs) -> str:
        """The text of `token_ids`."""
        return self.decode_text(np.asarray(token_ids, np.int32))

    @property
    def stop_tokens(self) -> set[int]:
        """Ids that end a response and are not passed on."""
        return set(self._stop_ids)

    @property
    def pad_id(self) -> int:
        """Padding is never seen by the model."""
        return 0

    @property
    def eos_id(self) -> int:
        """The first of the ids that end a response, 0 if there is none."""
        return next(iter(self._stop_ids), 0)

    @property
    def bos_id(self) -> int:
        """A prompt's own business; nothing is put before it."""
        return self.eos_id


class JetStreamEngine(engine_api.Engine):
    """Our engine as JetStream's contract has it. A dispatch gives up to W tokens, its "speculations".

    Its slot is a run of `samples_per_slot` of ours, all of one prompt. With `columns` a token is followed by
    the bits of further values of the state, so that they travel with it. The tokenizer must then have no stop
    ids, since bits may look like one; a sample ends where nothing is valid any more.
    """

    def __init__(
        self,
        engine: Engine,
        params: Params,
        tokenizer: Tokenizer,
        settings: DrawSettings,
        *,
        samples_per_slot: int = 1,
        columns: Sequence[str] = (),
        lock: contextlib.AbstractContextManager | None = None,
    ):
        """Takes no memory; the decode state comes with the first insert.

        Args:
          engine, params, tokenizer: of the model.
          settings: of all requests.
          samples_per_slot: divides the engine's slots; so many of these are one of JetStream's.
          columns: float32 fields [n, W] of the decode state.
          lock: held while something is dispatched; for another driver of the same devices. JetStream's own
            threads need one too: on a mesh all devices must get programs in one order.
        """
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
        """The weights that were given."""
        return self._params

    def init_decode_state(self, *args, **kwargs) -> DecodeState | None:
        """None: `insert` makes a state when there is something to put into it."""
        return None

    def prefill(
        self,
        *,
        params: Params,
        existing_prefix: WorkPrefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> WorkPrefix:
        """Keys and values of one prompt.

        Args:
          params: the weights.
          existing_prefix: None; JetStream's driver never has one.
          padded_tokens: int [T'], padded on the right, or a `Work`.
          true_length: T, of which `Work` has no need.
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
        """Decodes up to W tokens in every slot that is active."""
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
        """Tokens, validity and lengths side by side, int32 [n, 2 * W * C + 1], for one copy to the host."""
        bits = [
            jax.lax.bitcast_convert_type(getattr(state, name), jnp.int32) for name in self._columns
        ]
        token_nWC = jnp.stack([state.out_token, *bits], axis=-1)
        n, W, _ = token_nWC.shape
        valid_nW1 = (jnp.arange(W)[None] < state.out_count[:, None])[..., None]
        valid_nWC = jnp.broadcast_to(valid_nW1, token_nWC.shape).astype(jnp.int32)
        parts = (token_nWC.reshape(n, -1), valid_nWC.reshape(n, -1), state.count[:, None])
        return jnp.concatenate(parts, axis=1)

    def get_prefix_destination_sharding(self) -> Any:
        """Where a prefix goes before it is inserted."""
        return replicated(self.engine.mesh)

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:  # pyright: ignore
        """Nothing: `build_tokenizer` needs no file."""
        return tokenizer_pb2.TokenizerParameters()  # pyright: ignore

    def build_tokenizer(self, metadata: Any) -> Tokenizer:
        """The tokenizer that was given."""
        return self.tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        """JetStream's slots."""
        return self.engine.slot_sizes[-1] // self.samples_per_slot

    @property
    def samples_per_slot(self) -> int:
        """The engine's slots in one of JetStream's."""
        return self._samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        """Longest prompt in tokens."""
        return self.engine.max_prefill_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """Where the engine runs."""
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        """Not known."""
        return None
