"""Kernels on trial: what agrees with XLA is used, and what differs, fails or takes too long is not."""

import functools
import logging
import threading
import types

import jax
import jax.numpy as jnp
import pytest
from model_sizes import sized_model

from jaxrl.models.kernels import proof
from jaxrl.models.kernels.decode_attention import decode_attention
from jaxrl.models.kernels.grouped_matmul import grouped_matmul
from jaxrl.models.kernels.paged_attention import paged_attention_tpu
from jaxrl.models.kernels.proof import (
    Trial,
    attention_trial,
    decoding_trial,
    experts_trial,
    fault_of,
)
from jaxrl.models.kernels.splash_attention import splash_attention

FULL = ((0, 0.0, None, False),)
# A device that is here and calls itself a GPU, as a run on one sees it.
GPU = types.SimpleNamespace(platform="gpu", device_kind="a GPU")


def of_three(kernel, what="a kernel") -> Trial:
    """A kernel that has to double 1, -2 and 4."""
    return Trial(what, kernel, lambda x: 2 * x, lambda: (jnp.array([1.0, -2.0, 4.0]),))


def here(monkeypatch, *devices):
    monkeypatch.setattr(proof.jax, "devices", lambda: [*jax.local_devices(), *devices])


def splash(q, k, v, ids, kind, *, block_tokens=128, **_):
    return splash_attention(q, k, v, ids, kind, block_tokens=block_tokens, interpret=True)


@pytest.mark.long
@pytest.mark.parametrize(
    "kinds", [((0, 0.0, None),), ((100, 0.0, True), (100, 0.0, False)), ((0, 30.0, None),)]
)
def test_attention_agrees_forward_and_backward(kinds):
    sizes = (4, 2, 128, "bfloat16")
    trial = attention_trial("splash", sizes, kinds, tokens=256, kernel=splash)
    assert fault_of(trial) == ""
    assert "more than 1e-06" in fault_of(trial, tolerance=1e-6), "the two round differently"


KERNELS = {"paged_gpu": decode_attention, "paged_tpu": paged_attention_tpu}


@pytest.mark.parametrize(
    ("name", "kv_dtype", "kinds", "page"),
    [
        ("paged_gpu", "bfloat16", FULL, 0),
        ("paged_gpu", "bfloat16", FULL, 128),
        ("paged_gpu", "int8", FULL, 128),
        # As in gpt-oss: sinks, and windows in every other layer.
        ("paged_gpu", "bfloat16", ((70, 0.0, True, True), (70, 0.0, False, True)), 0),
        ("paged_gpu", "bfloat16", ((0, 30.0, None, False),), 128),
        ("paged_tpu", "bfloat16", ((70, 30.0, None, True),), 0),
        ("paged_tpu", "bfloat16", ((70, 30.0, None, True),), 128),
    ],
)
def test_decoding_agrees(name, kv_dtype, kinds, page):
    sizes = (8, 2, 128, "bfloat16", kv_dtype)
    interpreted = functools.partial(KERNELS[name], interpret=True)
    trial = decoding_trial(name, sizes, page, kinds, capacity=256, kernel=interpreted)
    assert fault_of(trial) == ""


def test_experts_agree():
    trial = experts_trial(128, 64, kernel=lambda *given: grouped_matmul(*given, "xla"))
    assert fault_of(trial) == ""


def one_page_off(q, slots, *rest):
    """A kernel that reads the page after the one that the table names."""
    table = jnp.roll(slots.table, 1, axis=1)
    return decode_attention(q, type(slots)(slots.pool, table, slots.shared), *rest, interpret=True)


def one_place_off(q, slots, layer, length_B, k, v, buffer, used_B, kind):
    """A kernel that writes the token to the place after its own."""
    out, after = decode_attention(
        q, slots, layer, length_B, k, v, buffer, used_B, kind, interpret=True
    )
    return out, jax.tree.map(lambda x: jnp.roll(x, 1, axis=2), after)


def test_wrong_kernels_are_found_out():
    for kernel in (one_page_off, one_place_off):
        wrong = decoding_trial(
            "paged_gpu", (4, 2, 16, "float32", "float32"), 64, capacity=256, kernel=kernel
        )
        assert "of its largest value away, more than 0.02" in fault_of(wrong)

    def ungrouped(x_MD, weight, rows_G, device, *_):
        return grouped_matmul(x_MD, weight, jnp.roll(rows_G, 1), device, "xla")

    assert "more than 0.02" in fault_of(experts_trial(64, 64, kernel=ungrouped))
    # 1.03 x 8 is .24 of 8 away.
    assert (
        fault_of(of_three(lambda x: 2.06 * x))
        == "a result is 0.03 of its largest value away, more than 0.02"
    )
    assert fault_of(of_three(lambda x: 2.03 * x)) == ""
    assert "nan of its largest" in fault_of(of_three(lambda x: x / 0 * 0))


def test_a_kernel_that_raises_or_hangs_is_not_waited_for():
    def refused(x):
        raise NotImplementedError("no such instruction\nand a page of text")

    assert fault_of(of_three(refused)) == "NotImplementedError: no such instruction"
    over = threading.Event()

    def slow(x):
        over.wait(60)
        return 2 * x

    assert fault_of(of_three(slow), limit_s=0.2) == "no result after 0.2 s"
    over.set()


def test_it_is_tried_once_and_all_processes_agree(monkeypatch, caplog):
    here(monkeypatch, GPU)
    calls = []

    def other_fails(function):
        calls.append(function())
        return [calls[-1], "no result after 60 s"]

    good = of_three(lambda x: 2 * x, "doubling")
    with caplog.at_level(logging.INFO, proof.__name__):
        assert [proof.stands(good, GPU, other_fails) for _ in range(2)] == [False, False]
    assert calls == [""], "tried once, and it agrees here"
    (line,) = caplog.messages
    assert line == "doubling is not used, and XLA in its place: no result after 60 s"
    caplog.clear()
    with caplog.at_level(logging.INFO, proof.__name__):
        assert proof.stands(good, GPU, lambda function: [function()] * 2)
    assert "doubling agrees with XLA" in caplog.messages[0]


def test_nothing_is_tried_on_cpu_nor_for_devices_that_are_not_here():
    def never(function):
        raise AssertionError("it is tried")

    wrong = of_three(lambda x: x)
    assert all(proof.stands(wrong, device, never) for device in (jax.devices()[0], GPU, None))


def test_a_model_falls_back_to_xla(monkeypatch, caplog):
    """The kernel cannot run on this CPU, whatever the device says of itself."""
    here(monkeypatch, GPU)
    model = sized_model(V=32, L=2, D=64, F=64, Q=4, K=2, H=16)
    found = proof.proven_attention(
        "cudnn", model, GPU, parts=2, dtype="bfloat16", gather=lambda function: [function()]
    )
    assert found == "xla"
    # Two devices share the heads.
    assert caplog.messages[0].startswith(
        "cudnn attention with 2 and 1 heads of 16 in bfloat16 is not"
    )
