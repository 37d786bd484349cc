"""What a compiled program launches and moves: by hand of lines as XLA writes them, and of a compiled loop."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from jaxrl_planner.compiled.counts import CompiledText, Counts

FOLDER = pathlib.Path(__file__).parent
# Two slots, V = 10. Two layers of [4, 4] in bfloat16, 32 bytes each, are sliced out of their stack.
GPU = (FOLDER / "decode_gpu.hlo").read_text()
# A list of layers: nothing is sliced. The host's numbers and the memory of the chip do not count on a TPU.
TPU = (FOLDER / "decode_tpu.hlo").read_text()


def decoding(text: str = GPU, **options) -> Counts:
    return CompiledText(text, "gpu", logits=20).decoding(2, **options)


def test_a_token_of_a_scan_on_a_gpu_by_hand():
    counts = decoding()
    # Of a layer: slice, product, write, counter, and its test; then head, copy, and the test of the loop.
    assert counts.kernels == 2 * 5 + 3
    assert counts.kernels_a_layer == 5
    assert counts.weight_bytes_copied == 2 * 32
    # The write of a row in place: two rows of 4 float32 read and written. Counters: add reads two numbers and
    # writes one, the comparison reads two and writes a byte. The copy of the logits reads and writes 80.
    assert counts.other_bytes == 2 * (32 + 4 + 32 + 8 + 4 + 8 + 1) + 160
    # Products of layers, and the logits; the test of the loop is a custom call with a byte.
    assert counts.product_bytes == 2 * 32 + 80 + 1
    # Written by the head, read and written by the copy.
    assert counts.logits_passes == 3
    # The conditional, and whether there is another token. The loop of layers has a known end.
    assert counts.host_visits == 2
    assert counts.loops_beside == 1


def test_in_a_graph_the_host_is_not_asked():
    counts = decoding(in_graphs=True)
    assert (counts.host_visits, counts.loops_beside) == (0, 0)


def test_the_longest_branch_is_that_of_special_sampling():
    text = CompiledText(GPU, "gpu", logits=20, longest_branch=True)
    # Two sums, one of which reads two arrays, in place of one copy.
    assert text.decoding(2).kernels == 2 * 5 + 4
    assert text.decoding(2).logits_passes == 1 + 3 + 3


def test_a_weight_that_the_loop_changes_is_no_weight():
    changed = GPU.replace("tuple(%n, %stack, %cached", "tuple(%n, %other, %cached")
    assert decoding(changed).weight_bytes_copied == 0


def test_a_token_on_a_tpu_by_hand():
    counts = CompiledText(TPU, "tpu").decoding(1)
    # The copy ahead of its use, one in memory, one on the chip, a conversion; the last three have scopes of
    # layers.
    assert (counts.kernels, counts.kernels_a_layer) == (4, 3)
    # What goes into the chip's memory is a read that would come anyway.
    assert counts.weight_bytes_copied == 32
    assert counts.other_bytes == 32 + 64
    assert counts.host_visits == counts.loops_beside == 0


@pytest.mark.parametrize("scanned", [True, False])
def test_a_compiled_loop_copies_the_layers_of_a_scan_alone(scanned):
    """A decode loop of this machine: four products of [8, 8], by a scan over a stack or from a list."""

    def generate(params, x, steps):
        def layer(x, w):
            return jnp.tanh(x @ w), None

        def token(carry):
            step, x = carry
            if scanned:
                return step + 1, jax.lax.scan(layer, x, params)[0]
            for w in params:
                x, _ = layer(x, w)
            return step + 1, x

        return jax.lax.while_loop(lambda c: c[0] < steps, token, (0, x))[1]

    one = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    stack = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32) if scanned else [one] * 4
    lowered = jax.jit(generate).lower(stack, one, jax.ShapeDtypeStruct((), jnp.int32))
    counts = CompiledText(lowered.compile().as_text(), "cpu").decoding(4)
    assert counts.product_bytes == 4 * 8 * 8 * 4
    assert counts.weight_bytes_copied == (4 * 8 * 8 * 4 if scanned else 0)
