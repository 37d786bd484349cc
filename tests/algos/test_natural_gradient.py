"""The step of a trust region, against NumPy's solution of the same quadratic problem."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.algos.natural_gradient import conjugate_gradients, line_search, step_length


def problem(n: int, rank: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A Fisher matrix of a given rank plus damping, and a gradient; float64."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(n, rank))
    return scores @ scores.T / rank + 0.1 * np.eye(n), rng.normal(size=n)


def tree(x: np.ndarray):
    """The vector as a pytree of two arrays."""
    return {"a": jnp.float32(x[:6]).reshape(2, 3), "b": jnp.float32(x[6:])}


def flat(vector) -> np.ndarray:
    return np.concatenate([np.asarray(vector["a"]).ravel(), np.asarray(vector["b"])])


def product_with(matrix: np.ndarray):
    def product(vector):
        x = jnp.concatenate([vector["a"].ravel(), vector["b"]])
        y = jnp.float32(matrix) @ x
        return {"a": y[:6].reshape(2, 3), "b": y[6:]}

    return product


def textbook_cg(matrix: np.ndarray, b: np.ndarray, iterations: int) -> np.ndarray:
    x, r = np.zeros_like(b), b.copy()
    p = r.copy()
    for _ in range(iterations):
        Ap = matrix @ p
        alpha = r @ r / (p @ Ap)
        x, new = x + alpha * p, r - alpha * Ap
        p, r = new + (new @ new) / (r @ r) * p, new
    return x


@pytest.mark.parametrize("iterations", [1, 3, 5])
def test_every_iteration_is_the_textbooks(iterations):
    matrix, b = problem(10, 10)
    x, product_x = conjugate_gradients(product_with(matrix), tree(b), iterations=iterations)
    np.testing.assert_allclose(flat(x), textbook_cg(matrix, b, iterations), rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(flat(product_x), matrix @ flat(x), rtol=2e-4, atol=1e-4)


def test_a_fisher_matrix_of_low_rank_is_solved_in_few_products():
    """Conjugate gradients need as many products as there are eigenvalues: three, and the damping."""
    matrix, b = problem(40, 3)
    x, _ = conjugate_gradients(product_with(matrix), tree(b), iterations=4)
    np.testing.assert_allclose(flat(x), np.linalg.solve(matrix, b), rtol=1e-3, atol=1e-3)
    # Iterations after the solution change nothing and give no NaN.
    more, _ = conjugate_gradients(product_with(matrix), tree(b), iterations=40)
    np.testing.assert_allclose(flat(more), np.linalg.solve(matrix, b), rtol=1e-3, atol=1e-3)


def test_the_step_reaches_the_bound_of_the_quadratic_model():
    matrix, b = problem(10, 10)
    x, product_x = conjugate_gradients(product_with(matrix), tree(b), iterations=20)
    length = float(step_length(x, product_x, max_kl=0.02))
    step = length * np.linalg.solve(matrix, b)
    assert step @ matrix @ step / 2 == pytest.approx(0.02, rel=1e-3)
    # No step with this KL gains more: the Lagrange conditions of max g.s in closed form.
    assert b @ step == pytest.approx(np.sqrt(2 * 0.02 * b @ np.linalg.solve(matrix, b)), rel=1e-3)


def test_no_gradient_is_no_step():
    matrix, b = problem(10, 10)
    x, product_x = conjugate_gradients(product_with(matrix), tree(0 * b), iterations=10)
    assert not flat(x).any() and step_length(x, product_x, max_kl=0.01) == 0


@pytest.mark.parametrize(
    ("losses", "kls", "fraction", "tried"),
    [
        ([0.9, 0.0, 0.0], [0.009, 1, 1], 1.0, 1),
        # Too far, then worse than before, then good.
        ([0.5, 1.1, 0.9], [0.011, 0.009, 0.004], 0.25, 3),
        ([np.nan, 0.9, 0.0], [np.nan, 0.01, 0.0], 0.5, 2),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], 0.0, 3),
        ([0.5, 0.5, 0.5], [0.011, 0.02, np.inf], 0.0, 3),
    ],
    ids=["at once", "the third", "after NaN", "no gain", "no bound"],
)
def test_a_line_search_takes_the_first_fraction_that_gains_within_the_bound(
    losses, kls, fraction, tried
):
    def measure(part):
        i = jnp.round(-jnp.log2(part)).astype(jnp.int32)
        return jnp.float32(losses)[i], jnp.float32(kls)[i]

    search = jax.jit(lambda loss: line_search(measure, loss, max_kl=0.01, tries=3))
    found = search(jnp.float32(1.0))
    assert (float(found.fraction), int(found.tried)) == (fraction, tried)
    taken = (losses[tried - 1], kls[tried - 1]) if fraction else (1.0, 0.0)
    assert (float(found.loss), float(found.kl)) == pytest.approx(taken)
