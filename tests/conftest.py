"""One setting for the whole suite: eight CPU devices, strict types and shapes, the same examples every time.

The settings are made here, at import, because JAX reads the device count once, when it first needs a
device; a fixture would come too late.
"""

import hypothesis
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Two dtypes never meet by accident, and a [B] array never quietly lines up with the last axis of a [B, T].
jax.config.update("jax_numpy_dtype_promotion", "strict")

# A first call compiles, which no deadline fits; without randomness a failure is everyone's failure.
hypothesis.settings.register_profile("jaxrl", deadline=None, max_examples=50, derandomize=True)
hypothesis.settings.load_profile("jaxrl")
