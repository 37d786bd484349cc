"""Messages and arrays of the Tinker API, byte by byte where the wire was recorded."""

import numpy as np
import pytest

from jaxrl.errors import UserError
from jaxrl_tinker.wire import (
    MESSAGES,
    array_of,
    forward_backward_output,
    parse,
    tensor_of,
    tokens_of,
    topk_of,
)


def field(number: int, content: bytes) -> bytes:
    """A field of bytes, as protobuf writes it: (number << 3 | 2), length, content."""
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def ints(*values, type_="<i8") -> bytes:
    return np.array(values, type_).tobytes()


def test_a_forward_backward_is_read_from_its_bytes():
    """Field numbers of `tinker_wire.md`: two chunks of one datum, targets dense, weights as CSR."""
    chunk = lambda *tokens: field(1, field(1, field(1, ints(*tokens, type_="<i4"))))  # noqa: E731
    targets = field(1, ints(6, 7, 8)) + bytes([3 << 3, 2]) + field(4, bytes([3]))
    csr = field(1, np.float32([0.5]).tobytes()) + field(2, ints(0, 0, 1, 1)) + field(3, ints(0))
    weights = field(2, csr) + bytes([3 << 3, 1]) + field(4, bytes([3, 1]))
    entry = lambda name, tensor: field(2, field(1, name) + field(2, tensor))  # noqa: E731
    datum = chunk(5, 6) + chunk(7) + entry(b"target_tokens", targets) + entry(b"weights", weights)
    long = bytes([3 << 3 | 2, len(datum) & 127 | 128, len(datum) >> 7]) + datum
    body = field(1, b"s1:train:0") + bytes([2 << 3, 2]) + long + field(4, b"cross_entropy")
    body += field(7, field(1, b"beta") + field(2, bytes([1 << 3 | 1]) + np.float64(0.5).tobytes()))
    request = parse("ForwardBackwardRequest", body)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s1:train:0", 2, "cross_entropy")
    (datum,) = request.data
    assert tokens_of(datum.model_input).tolist() == [5, 6, 7]
    assert array_of(datum.loss_fn_inputs["target_tokens"], "t").tolist() == [6, 7, 8]
    assert array_of(datum.loss_fn_inputs["weights"], "w").tolist() == [[0.0], [0.5], [0.0]]
    assert request.loss_fn_config_v2["beta"].number == 0.5
    with pytest.raises(UserError, match="send it whole"):
        parse("ForwardBackwardRequest", body[:-3])


def test_answers_have_one_record_per_shape_with_byte_offsets():
    arrays = [np.float32([1, 2, 3]), np.float32([4]), np.float32([[5, 6]])]
    output = parse("ForwardBackwardOutput", forward_backward_output(arrays, {"loss:sum": 1.5}))
    flat, two = output.loss_fn_outputs
    assert dict(output.metrics) == {"loss:sum": 1.5}
    assert (flat.num_datums, two.num_datums) == (2, 1)
    batched = flat.fields["logprobs"]
    assert np.frombuffer(batched.offsets, "<i8").tolist() == [0, 12, 16]
    assert np.frombuffer(batched.data, "<f4").tolist() == [1, 2, 3, 4]
    assert list(two.fields["logprobs"].trailing_shape) == [2]


def test_empty_cells_of_top_k_are_as_recorded():
    top = topk_of(np.array([[-1, -1], [3, 4]]), np.float32([[0, 0], [-0.5, -1]]))
    assert np.frombuffer(top.token_ids, "<i4").tolist() == [0, 0, 3, 4]
    assert np.frombuffer(top.logprobs, "<f4").tolist() == [-99999, -99999, -0.5, -1]
    assert (top.k, top.length) == (2, 2)


@pytest.mark.parametrize("array", [np.float32([1.5, -2]), np.array([[1, 2], [3, 4]])])
def test_a_tensor_comes_back(array):
    np.testing.assert_array_equal(array_of(tensor_of(array), "x"), array)


def test_bfloat16_is_the_upper_half_of_a_float32():
    halves = (np.float32([1.5, -3]).view(np.uint32) >> 16).astype("<u2").tobytes()
    tensor = MESSAGES["Tensor"](dense=halves, dtype=4, shape=[2])
    assert array_of(tensor, "x").tolist() == [1.5, -3]


CSR = MESSAGES["SparseCsr"](values=ints(7), crow_indices=ints(0, 1, 1), col_indices=ints(1))


def csr(**changes) -> dict:
    found = MESSAGES["SparseCsr"]()
    found.CopyFrom(CSR)
    for name, value in changes.items():
        setattr(found, name, value)
    return {"sparse_csr": found, "dtype": 2, "shape": [2, 2]}


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        ({"dense": b"12345", "dtype": 1, "shape": [1]}, "bytes"),
        ({"dense": ints(1, 2), "dtype": 2, "shape": [3]}, "values of its shape"),
        ({"dense": ints(1), "dtype": 9, "shape": [1]}, "dtype"),
        ({"dense": ints(1), "dtype": 2, "shape": [-1]}, "shape"),
        ({"dense": b"", "dtype": 2, "shape": [1, 1, 1]}, "shape"),
        (csr(col_indices=ints(2)), "CSR"),
        (csr(crow_indices=ints(0, 2, 1)), "CSR"),
        (csr(crow_indices=ints(0, 1)), "CSR"),
        (csr(values=b""), "CSR"),
        (csr() | {"shape": [2, 2**40]}, "too large"),
    ],
)
def test_a_tensor_that_contradicts_itself_is_refused(tensor, says):
    with pytest.raises(UserError, match=says):
        array_of(MESSAGES["Tensor"](**tensor), "weights")
    if "sparse_csr" in tensor:
        assert array_of(MESSAGES["Tensor"](**csr()), "x", fill=-1).tolist() == [[-1, 7], [-1, -1]]


def test_images_are_refused_by_name():
    request = parse("Datum", field(1, field(2, b"")))
    with pytest.raises(UserError, match="image"):
        tokens_of(request.model_input)
