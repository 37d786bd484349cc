"""The messages of the Tinker API in protobuf, the arrays in them, and the sequences that a request trains on.

`wire.textproto` is ours, after the wire as it was recorded with tinker 0.38; field numbers are what matters.
There an enum is an int32, and an optional field is a oneof of its own.

Arrays are little-endian bytes. N tokens of a sequence   K values of a token
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from google.protobuf.message import DecodeError

from jaxrl.errors import UserError
from jaxrl_tinker.accumulating import Targets
from jaxrl_tinker.summed_losses import SUMMED_LOSSES

# Values of `dtype`. Those of `stop_reason` are 0 for a stop id or string, and 1 for the limit.
_FLOAT32, _INT64 = 1, 2
# bfloat16 is the upper half of a float32.
_TYPES = {_FLOAT32: "<f4", _INT64: "<i8", 3: "<i4", 4: "<u2"}

# Cells of a dense array that a sparse one may stand for: 64 MB of float32.
_MAX_CELLS = 1 << 24


def _messages(text: str) -> dict[str, Any]:
    """The classes of the messages of a FileDescriptorProto in text format, by name."""
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    pool = descriptor_pool.DescriptorPool()
    # Some implementations of protobuf return nothing from `Add`.
    found = (pool.Add(file) or pool.FindFileByName(file.name)).message_types_by_name
    return {name: message_factory.GetMessageClass(found[name]) for name in found}


MESSAGES = _messages(pathlib.Path(__file__).with_suffix(".textproto").read_text("utf-8"))


def parse(kind: str, body: bytes) -> Any:
    """The message of that kind in a body.

    Raises:
      UserError: it is none, or cut short.
    """
    try:
        return MESSAGES[kind].FromString(body)
    except DecodeError as error:
        raise UserError(
            f"the body of {len(body)} bytes is no {kind} ({error}); send it whole, as tinker 0.38 does"
        ) from error


def array_of(tensor: Any, name: str, *, fill: float = 0) -> np.ndarray:
    """The array of a Tensor, dense; cells that a sparse one does not list hold `fill`.

    Raises:
      UserError: its bytes, its shape and its type do not go together.
    """
    shape = tuple(tensor.shape)
    if tensor.dtype not in _TYPES:
        raise UserError(f"{name} has dtype {tensor.dtype}; send float32 or int64")
    if any(size < 0 for size in shape) or len(shape) > 2:
        raise UserError(f"{name} has shape {list(shape)}; send [N] or [N, K]")
    try:
        if tensor.WhichOneof("encoding") != "sparse_csr":
            values = _numbers(tensor.dense, tensor.dtype)
            return values.reshape(shape or len(values))
        csr = tensor.sparse_csr
        values = _numbers(csr.values, tensor.dtype)
        crow, columns = (np.frombuffer(x, "<i8") for x in (csr.crow_indices, csr.col_indices))
        if len(shape) != 2 or shape[0] * shape[1] > _MAX_CELLS:
            raise UserError(
                f"{name} is sparse with shape {list(shape)}; send [N, K], not too large"
            )
        counts = np.diff(crow)
        fits = (
            len(crow) == shape[0] + 1 and crow[0] == 0 and crow[-1] == len(values) == len(columns)
        )
        inside = not len(columns) or (columns.min() >= 0 and columns.max() < shape[1])
        if not fits or not inside or (counts < 0).any():
            raise UserError(
                f"{name}: its CSR indices do not describe {list(shape)}; send them as PyTorch"
            )
        dense = np.full(shape, fill, values.dtype)
        dense[np.repeat(np.arange(shape[0]), counts), columns] = values
        return dense
    except (ValueError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{name}: {error}; its bytes must hold the {list(shape)} values of its shape"
        ) from error


def _numbers(content: bytes, dtype: int) -> np.ndarray:
    values = np.frombuffer(content, _TYPES[dtype])
    if dtype == 4:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values


def tensor_of(array: np.ndarray) -> Any:
    """A dense Tensor of float32 or int64."""
    kind = _FLOAT32 if array.dtype == np.float32 else _INT64
    return MESSAGES["Tensor"](
        dense=array.astype(_TYPES[kind]).tobytes(), dtype=kind, shape=array.shape
    )


def tokens_of(chunks: Sequence[Any]) -> np.ndarray:
    """The tokens of a model input, int32 [N].

    Raises:
      UserError: a chunk is no text.
    """
    kinds = {chunk.WhichOneof("chunk") for chunk in chunks} - {"encoded_text"}
    if kinds:
        raise UserError(
            f"a chunk of kind {', '.join(sorted(map(str, kinds)))}: this model reads text; send encoded_text"
        )
    content = b"".join(chunk.encoded_text.tokens for chunk in chunks)
    if len(content) % 4:
        raise UserError(f"encoded_text has {len(content)} bytes; tokens are int32, of 4 bytes each")
    return np.frombuffer(content, "<i4")


def forward_backward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """The answer to a forward or a forward_backward.

    Args:
      logprobs: float32 [N] or [N, K] of each datum.
      metrics: values by name, "loss:sum".
    """
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord", metrics=metrics)
    # A record has one trailing shape, so data with different K take several.
    start = 0
    for stop in range(1, len(logprobs) + 1):
        if stop < len(logprobs) and logprobs[stop].shape[1:] == logprobs[start].shape[1:]:
            continue
        part = logprobs[start:stop]
        offsets = np.cumsum([0, *(4 * x.size for x in part)], dtype="<i8")
        record = output.loss_fn_outputs.add(num_datums=len(part))
        record.fields["logprobs"].MergeFrom(
            MESSAGES["BatchedTensor"](
                data=b"".join(x.astype("<f4").tobytes() for x in part),
                offsets=offsets.tobytes(),
                dtype=_FLOAT32,
                trailing_shape=part[0].shape[1:],
            )
        )
        start = stop
    return output.SerializeToString()


def topk_of(ids: np.ndarray, logprobs: np.ndarray) -> Any:
    """TopkLogprobs of int32 and float32 [N, K]; -1 marks a place without any."""
    # Empty cells as the recorded service sends them: id 0 with -99999.
    none = ids < 0
    return MESSAGES["TopkLogprobs"](
        token_ids=np.where(none, 0, ids).astype("<i4").tobytes(),
        logprobs=np.where(none, -99999.0, logprobs).astype("<f4").tobytes(),
        k=ids.shape[1],
        length=ids.shape[0],
    )


def read_data(request: Any, longest: int, vocabulary: int) -> list[Targets]:
    """The data of a ForwardBackwardRequest.

    Args:
      request: the message.
      longest: number of tokens of the longest sequence.
      vocabulary: number of tokens of the model.

    Raises:
      UserError: something does not fit; the message names the datum.
    """
    config = dict(request.loss_fn_config) | {
        key: value.number if value.WhichOneof("value") == "number" else value.text
        for key, value in request.loss_fn_config_v2.items()
    }
    name = request.loss_fn
    if name == "stable_reinforce":
        raise UserError(
            "loss_fn stable_reinforce is not published, so only its maker can serve it; use "
            "loss_fn=importance_sampling"
        )
    if name not in SUMMED_LOSSES:
        raise UserError(
            f"loss_fn {name[:80]!r} is not served; use one of {', '.join(SUMMED_LOSSES)}, or a loss of your "
            "own by forward_backward_custom"
        )
    loss = SUMMED_LOSSES[name]
    for key, value in config.items():
        if key not in loss.numbers:
            known = ", ".join(loss.numbers) or "none"
            raise UserError(f"loss_fn_config {key[:80]!r} is no setting of {name}; it has {known}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise UserError(f"loss_fn_config {key} is {value!r}; send a finite number")
    if not request.data:
        raise UserError("the request has no data; send at least one datum")
    numbers = {**loss.numbers, **config}
    if request.forward_only:
        # Custom losses ask for log-probabilities alone: their own inputs stay with the client.
        numbers |= dict.fromkeys(loss.inputs, 1.0)
    return [
        _read_datum(datum, f"datum {i}", request, numbers, longest, vocabulary)
        for i, datum in enumerate(request.data)
    ]


def _read_datum(
    datum: Any,
    where: str,
    request: Any,
    numbers: Mapping[str, float],
    longest: int,
    vocabulary: int,
) -> Targets:
    tokens = tokens_of(datum.model_input)
    if not 1 <= len(tokens) <= longest:
        raise UserError(
            f"{where} has {len(tokens)} tokens; this server trains on 1 to {longest}: cut it, or start the "
            "server with more --train_tokens"
        )
    if "target_tokens" not in datum.loss_fn_inputs:
        raise UserError(f"{where} has no target_tokens in loss_fn_inputs; send them")
    tensors = datum.loss_fn_inputs
    targets = array_of(tensors["target_tokens"], f"{where}: target_tokens")
    if len(targets) != len(tokens) or targets.ndim not in (1, 2) or not targets.size:
        raise UserError(
            f"{where} has target_tokens {list(targets.shape)} for {len(tokens)} tokens; send [N] or [N, K]"
        )
    for name, ids in (("tokens", tokens), ("target_tokens", targets)):
        if not np.issubdtype(ids.dtype, np.integer):
            raise UserError(f"{where}: {name} are {ids.dtype}; send int64")
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise UserError(
                f"{where}: {name} go from {ids.min()} to {ids.max()}; this model's go from 0 to "
                f"{vocabulary - 1}: use its own tokenizer"
            )
    loss = SUMMED_LOSSES[request.loss_fn]
    if targets.ndim == 2 and targets.shape[1] > 1 and request.loss_fn != "cross_entropy":
        raise UserError(
            f"{where} has {targets.shape[1]} targets of each token; {request.loss_fn} takes one"
        )
    extra = tensors.keys() - {"target_tokens", *loss.arrays}
    if extra and not request.forward_only:
        raise UserError(
            f"{where} has {', '.join(sorted(extra))}, which {request.loss_fn} does not take; it takes "
            f"{', '.join(('target_tokens', *loss.arrays))}"
        )
    inputs: dict[str, np.ndarray] = {}
    for name in loss.arrays:
        if name not in tensors:
            if name not in numbers:
                raise UserError(
                    f"{where} has no {name} in loss_fn_inputs, which {request.loss_fn} needs"
                )
            values = np.full(targets.shape, numbers[name], np.float32)
        else:
            values = array_of(tensors[name], f"{where}: {name}").astype(np.float32)
            if values.shape != targets.shape:
                raise UserError(
                    f"{where} has {name} {list(values.shape)} and target_tokens {list(targets.shape)}; send "
                    "arrays of one shape"
                )
            if not np.isfinite(values).all():
                raise UserError(
                    f"{where}: {name} has values that are not finite; remove NaN and infinity"
                )
        inputs[name] = values.reshape(len(tokens), -1)
    return Targets(tokens, targets.astype(np.int32).reshape(len(tokens), -1), inputs)
