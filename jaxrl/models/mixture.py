"""Mixture of experts as the feed-forward network: router, load-balancing loss, metrics.

B sequences   T tokens   A experts of a token   E experts   D width   F width of an expert   L layers
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl.models.compute import Compute
from jaxrl.models.model_config import ModelConfig
from jaxrl.models.modules import FeedForward, Projection, RMSNorm, constant, normal

# Added to a sum of sigmoids, which may be 0; a softmax does not see it.
_TINY = 1e-20


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """The routing of a layer, as sums over its tokens without padding. Stacked over layers: [L, ...].

    Attributes:
      chosen_E: float32, number of tokens that chose each expert.
      probability_E: float32, sum over tokens of the router's probability of each expert.
      num_tokens: float32, number of tokens.
      expert: int16 [B, T, A], the experts of each token; None unless `Compute.keeps_routes`.
      same: float32, number of tokens whose given experts (`Compute.routes`) the router would have chosen, in
        any order, and number of tokens with given experts; None without.
    """

    chosen_E: jax.Array
    probability_E: jax.Array
    num_tokens: jax.Array
    expert: jax.Array | None = None
    same: tuple[jax.Array, jax.Array] | None = None


class MixtureOfExperts(nnx.Module):
    """Every token goes to its `experts_per_token` most probable experts; none is dropped.

    The router is a softmax over all experts in float32, as in Transformers. With `normalize_experts` that is
    the same as a softmax over those of a token (gpt-oss). With `sigmoid_routing` a bias takes part in the
    choice of experts, not in their weights. A shared expert is a dense network that every token passes too.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        width, inner = ("embed", config.d_model), ("mlp", config.d_ff)
        stack = (("experts", config.num_experts),)
        options: Any = {"lora": config.lora, "rngs": rngs, "stack": stack}
        options["bias"] = config.expert_biases
        self.router = normal(
            rngs.params(), (width, (None, config.num_experts)), fan_in=config.d_model
        )
        if config.expert_biases:
            self.router_bias = constant(0.0, ((None, config.num_experts),))
        if config.sigmoid_routing:
            # Exact: rounding could change which experts are chosen. Pretraining has balanced the load by it,
            # and no update changes it (`lora.FROZEN`).
            self.correction_bias = constant(0.0, ((None, config.num_experts),), exact=True)
        self.gate = Projection("gate", (width,), (inner,), **options)
        self.up = Projection("up", (width,), (inner,), **options)
        self.down = Projection("down", (inner,), (width,), **options)
        if config.shared_d_ff:
            self.shared = FeedForward(config, config.shared_d_ff, rngs=rngs)
        if config.shared_gate:
            self.shared_gate = normal(rngs.params(), (width,), fan_in=config.d_model)
        if config.expert_norms:
            norm = functools.partial(RMSNorm, (width,), config.rms_norm_eps)
            self.router_norm, self.experts_norm = norm(), norm()
            self.experts_post_norm, self.shared_post_norm = norm(), norm()
            self.expert_scale = constant(1.0, ((None, config.num_experts),))
        self.config = config

    def __call__(
        self,
        x_BTD: jax.Array,
        live_BT: jax.Array,
        compute: Compute,
        residual_BTD: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing]:
        """Applies the experts; returns [B, T, D], and the routing.

        Args:
          x_BTD: activations.
          live_BT: bool, False for padding, which goes to no expert but the shared one.
          compute: implementation of the forward pass.
          residual_BTD: the activations before their norm, which `expert_norms` need.
        """
        config = self.config
        to_router_BTD = to_experts_BTD = x_BTD
        if config.expert_norms:
            assert residual_BTD is not None, "the layer passes it"
            to_router_BTD = self.router_norm(residual_BTD) * config.d_model**-0.5
            to_experts_BTD = self.experts_norm(residual_BTD)
        with jax.named_scope("router"):
            expert_BTA, share_BTA, probability_BTE, same = self._route(
                to_router_BTD, live_BT, compute
            )
        weights, axes = self._expert_weights(compute)
        out_BTD = compute.experts(
            to_experts_BTD, expert_BTA, share_BTA, weights, axes, config.activation
        )
        if config.expert_norms:
            out_BTD = self.experts_post_norm(out_BTD)
        if config.shared_d_ff:
            with jax.named_scope("shared"):
                shared_BTD, _ = self.shared(x_BTD, live_BT, compute)
                if config.expert_norms:
                    shared_BTD = self.shared_post_norm(shared_BTD)
                if config.shared_gate:
                    gate_BT = compute.product(x_BTD, self.shared_gate[...])
                    shared_BTD = shared_BTD * jax.nn.sigmoid(gate_BT)[..., None]
                out_BTD = out_BTD + shared_BTD
        # One more, which is cut off, for the experts of padding.
        chosen = jnp.bincount(expert_BTA.reshape(-1), length=config.num_experts + 1)
        routing = Routing(
            chosen_E=chosen[: config.num_experts].astype(jnp.float32),
            probability_E=jnp.sum(probability_BTE, axis=(0, 1), where=live_BT[..., None]),
            num_tokens=live_BT.sum(dtype=jnp.float32),
            expert=expert_BTA.astype(jnp.int16) if compute.keeps_routes else None,
            same=same,
        )
        return out_BTD, routing

    def _route(
        self, x_BTD: jax.Array, live_BT: jax.Array, compute: Compute
    ) -> tuple[jax.Array, jax.Array, jax.Array, Any]:
        """Experts and their weights of each token, [B, T, A], probabilities [B, T, E], `Routing.same`."""
        config, same = self.config, None
        logits_BTE = jnp.einsum(
            "btd,de->bte",
            x_BTD,
            self.router[...].astype(compute.dtype),
            preferred_element_type=jnp.float32,
        )
        if config.expert_biases:
            logits_BTE = logits_BTE + self.router_bias[...].astype(jnp.float32)[None, None]
        if config.sigmoid_routing:
            score_BTE = jax.nn.sigmoid(logits_BTE)
            expert_BTA = self._chosen(score_BTE)
            # Of the balancing loss, which needs probabilities.
            probability_BTE = score_BTE / (score_BTE.sum(-1, keepdims=True) + _TINY)
        else:
            score_BTE = probability_BTE = jax.nn.softmax(logits_BTE, axis=-1)
            expert_BTA = jax.lax.top_k(probability_BTE, config.experts_per_token)[1]
        if compute.routes is not None:
            expert_BTA, same = _replayed(expert_BTA, compute.routes, live_BT)
        # The score without the bias, which only chooses.
        share_BTA = jnp.take_along_axis(score_BTE, expert_BTA, axis=-1)
        if config.normalize_experts:
            share_BTA = share_BTA / (share_BTA.sum(-1, keepdims=True) + _TINY)
        if config.routed_scale != 1:
            share_BTA = share_BTA * config.routed_scale
        if config.expert_norms:
            share_BTA = share_BTA * self.expert_scale[...].astype(jnp.float32)[expert_BTA]
        # Padding gets an expert number that no expert has.
        expert_BTA = jnp.where(live_BT[..., None], expert_BTA, config.num_experts)
        return expert_BTA, share_BTA, probability_BTE, same

    def _expert_weights(self, compute: Compute) -> tuple[Any, Any]:
        """The weights of the experts' projections by name, in `Compute.dtype`, and their logical axes."""
        weights, axes = {}, {}
        for name in ("gate", "up", "down"):
            projection: Projection = getattr(self, name)
            leaves = {"weight": projection.weight}
            if projection.has_bias:
                leaves["bias"] = projection.bias
            if projection.has_adapter:
                leaves |= {"lora_a": projection.lora_a, "lora_b": projection.lora_b}
            axes[name] = {key: leaf.get_metadata()["axes"] for key, leaf in leaves.items()}
            # Experts in 8 bits are widened here, one layer at a time: grouped matmuls take no scales.
            weights[name] = {
                key: leaf.get_value().astype(compute.dtype) for key, leaf in leaves.items()
            }
            if projection.has_adapter:
                # In the factor, so that the functions of experts need no scale.
                weights[name]["lora_b"] = weights[name]["lora_b"] * projection.scale
        return weights, axes

    def _chosen(self, score_BTE: jax.Array) -> jax.Array:
        """The experts of each token, int32 [B, T, A], by score and bias: groups first, then of these."""
        config = self.config
        biased_BTE = score_BTE + self.correction_bias[...].astype(jnp.float32)[None, None]
        if config.expert_groups > 1:
            by_group = biased_BTE.reshape(*biased_BTE.shape[:2], config.expert_groups, -1)
            # As in DeepSeek-V3: a group counts as much as its two best experts.
            of_group = jax.lax.top_k(by_group, 2)[0].sum(-1)
            groups = jax.lax.top_k(of_group, config.groups_per_token)[1]
            kept = jax.nn.one_hot(groups, config.expert_groups, dtype=bool).any(-2)
            # Not 0, since a bias may make the score of a kept expert negative.
            by_group = jnp.where(kept[..., None], by_group, -jnp.inf)
            biased_BTE = by_group.reshape(biased_BTE.shape)
        return jax.lax.top_k(biased_BTE, config.experts_per_token)[1]


def _replayed(
    own_BTA: jax.Array, given_BTA: jax.Array, live_BT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The given experts, or a token's own where they are -1, and `Routing.same`."""
    given_BTA = given_BTA.astype(own_BTA.dtype)
    given_BT = (given_BTA[..., 0] >= 0) & live_BT
    same_BT = (own_BTA[..., None] == given_BTA[..., None, :]).any(-1).all(-1)
    counts = [x.sum(dtype=jnp.float32) for x in (same_BT & given_BT, given_BT)]
    return jnp.where(given_BT[..., None], given_BTA, own_BTA), (counts[0], counts[1])


def load_balancing_loss(routing: Routing) -> jax.Array:
    """E * sum_e f_e P_e of each layer, averaged over layers (Fedus et al. 2021, eq. 4).

    f_e is the share of tokens that chose expert e (the shares sum to A), and P_e the mean probability of e.
    The gradient flows through P only. Even routing gives A. The function of this name in Transformers
    multiplies means over all layers instead; for a single layer the two agree.

    Args:
      routing: routing of all layers, [L, ...].

    Returns:
      A float32 scalar, 0 without tokens.
    """
    tokens_L1 = jnp.maximum(routing.num_tokens, 1.0)[:, None]
    chosen_LE, probability_LE = routing.chosen_E / tokens_L1, routing.probability_E / tokens_L1
    num_experts = chosen_LE.shape[-1]
    return num_experts * jnp.mean(jnp.sum(chosen_LE * probability_LE, axis=-1))


def routing_metrics(routing: Routing) -> dict[str, jax.Array]:
    """Metrics of how evenly the experts are used, scalars by name.

    Returns:
      moe/load_balancing_loss: see `load_balancing_loss`.
      moe/max_load: tokens of the busiest expert over the mean, in the worst layer; 1 is even.
      moe/idle_experts: share of experts without any token.
      moe/same_routes: with replayed routes, share of the tokens' layers in which the router would have chosen
        the sampler's experts.
    """
    mean_L = jnp.maximum(routing.chosen_E.mean(-1), 1e-9)
    agreement = {}
    if routing.same is not None:
        same, given = (count_L.sum() for count_L in routing.same)
        agreement["moe/same_routes"] = same / jnp.maximum(given, 1.0)
    return agreement | {
        "moe/load_balancing_loss": load_balancing_loss(routing),
        "moe/max_load": jnp.max(routing.chosen_E.max(-1) / mean_L),
        "moe/idle_experts": jnp.mean((routing.chosen_E == 0).astype(jnp.float32)),
    }
