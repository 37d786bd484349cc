"""The dry run: its numbers are those one can work out by hand, and those of real arrays."""

import dataclasses
import io
import pathlib
import resource
import time

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxrl.data.packing import PackedShape
from jaxrl.errors import UserError
from jaxrl.mesh.devices import build_mesh
from jaxrl.mesh.layout import LayoutConfig, ParallelLayout
from jaxrl.models.config import ModelConfig
from jaxrl.planner.dry_run import BatchFlow, DryRun, dry_run
from jaxrl.roles.actor import Actor
from jaxrl.roles.losses import policy
from jaxrl.roles.optimizer import OptimConfig
from jaxrl.roles.packed_model import TrainConfig
from jaxrl.rollout.engine import EngineConfig
from jaxrl.trainer.command_line import load_config
from jaxrl.trainer.config import Config

RECIPE = pathlib.Path(__file__).parents[2] / "configs/dapo_qwen32b.py"
LOSS = policy("clipped", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0})

TINY = ModelConfig(
    vocab_size=64, num_layers=4, d_model=32, d_ff=64, num_heads=4, num_kv_heads=2, head_dim=8
)
TINY_LAYOUT = LayoutConfig(train="1-4-2", generate="1-2-2-2", fsdp=2)
TINY_TRAIN = TrainConfig(rows=4, row_tokens=16, logprob_chunk_tokens=8, remat="full")
TINY_ENGINE = EngineConfig(
    slots=8,
    prefill_prompts=4,
    max_prompt_tokens=6,
    max_response_tokens=10,
    tokens_per_dispatch=4,
    stop_ids=(1,),
)
# As many updates as layers: one loop must not be taken for the other.
TINY_FLOW = BatchFlow(12, 10, 8, 4, PackedShape(4, 2, 4, 16))


def plan_tiny(**changes) -> DryRun:
    arguments = {
        "layout": ParallelLayout.from_config(TINY_LAYOUT),
        "train": TINY_TRAIN,
        "optim": OptimConfig(),
        "engine": TINY_ENGINE,
        "temperature": 1.0,
        "objective": LOSS,
        "flow": TINY_FLOW,
        **changes,
    }
    return dry_run("tiny", TINY, **arguments)


def plan_recipe(config: Config) -> DryRun:
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_response_tokens
    return dry_run(
        config.name,
        config.model,
        ParallelLayout.from_config(config.mesh),
        train=config.train,
        optim=config.optim,
        engine=EngineConfig(
            slots=rollout.slots,
            prefill_prompts=rollout.prefill_prompts,
            max_prompt_tokens=config.data.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            tokens_per_dispatch=rollout.tokens_per_dispatch,
            stop_ids=(0,),
            dtype=jnp.dtype(rollout.dtype),
        ),
        temperature=rollout.temperature,
        objective=LOSS,
        flow=BatchFlow(
            generation_prompts=rollout.generation_prompts,
            max_generation_batches=rollout.max_generation_batches,
            num_prompts=rollout.num_prompts,
            num_samples=rollout.num_samples,
            shape=PackedShape.for_sequences(
                rollout.num_prompts * rollout.num_samples,
                longest=longest,
                minibatches=config.algorithm.updates_per_step,
                rows=config.train.rows,
                tokens=config.train.row_tokens,
            ),
            keeps_mixed_groups=True,
        ),
    )


@pytest.fixture(scope="module")
def recipe() -> DryRun:
    return plan_recipe(load_config(Config, str(RECIPE), {}))


def holding(plan: DryRun, name: str):
    (found,) = [h for h in plan.holdings if h.name == name]
    return found


def text_of(plan: DryRun) -> str:
    out = io.StringIO()
    plan.show(Console(file=out))
    return out.getvalue()


def test_the_32b_recipe_by_hand(recipe):
    parameters = 32_763_876_352
    assert holding(recipe, "actor in training").num_values == parameters
    # Float32 over t x fsdp = 8 x 16; norms and biases are split over one of the two only.
    masters = holding(recipe, "actor in training").bytes_per_device
    assert masters == pytest.approx(parameters * 4 / 128, rel=1e-3)
    assert holding(recipe, "optimiser state").bytes_per_device == pytest.approx(2 * masters)
    assert holding(recipe, "gradients").bytes_per_device == 2 * masters
    # Bfloat16 over t_g = 4, norms whole.
    assert holding(recipe, "actor in generation").bytes_per_device == pytest.approx(
        parameters * 2 / 4, rel=1e-3
    )
    # 12 slots of 2048 + 20480 tokens and 64 of a dispatch, 262,144 bytes each over t_g = 4, and their ids.
    cache = 12 * 22_592 * 262_144 // 4
    assert holding(recipe, "KV cache and slots").bytes_per_device == pytest.approx(cache, rel=1e-3)
    # [U, M, R, T] = [16, 32, 16, 22528], ten fields of 4 bytes, rows over 16 replicas.
    batch = 10 * 4 * 16 * 32 * 22_528
    assert holding(recipe, "train batch").bytes_per_device == pytest.approx(batch, rel=1e-6)
    # With "full" nothing of a layer is kept but its input: L x T x D in bfloat16.
    assert holding(recipe, "kept of the layers").bytes_per_device == 64 * 22_528 * 5120 * 2
    # Attention is blockwise, so that is the feed-forward network's T x F / t, in bfloat16.
    widest = 22_528 * 27_648 // 8 * 2
    assert holding(recipe, "largest value in a layer").bytes_per_device == widest


def test_totals_leave_out_what_is_not_there(recipe):
    total = sum(h.bytes_per_device for h in recipe.holdings)
    cache = holding(recipe, "KV cache and slots").bytes_per_device
    assert recipe.learning_bytes == total - cache
    assert recipe.sampling_bytes < total
    assert max(recipe.sampling_bytes, recipe.learning_bytes) < 80e9


def test_the_32b_recipe_takes_neither_memory_nor_time():
    config = load_config(Config, str(RECIPE), {})
    arrays = len(jax.live_arrays())
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.monotonic()
    plan_recipe(config)
    assert len(jax.live_arrays()) == arrays
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 500_000
    assert time.monotonic() - started_s < 50


def test_the_flow_tells_every_number_of_a_step(recipe):
    flow = dict(recipe.flow)
    assert flow["generation batch"].startswith("1,536 prompts x 16 samples = 24,576 responses")
    assert "512, with right and wrong answers = 8,192 sequences" in flow["groups kept"]
    assert flow["learning"] == (
        "16 updates x 512 sequences, each in at most 32 microbatches of 16 rows x 22,528 tokens"
    )
    assert flow["decoding"].startswith("384 slots over 32 replicas, 12 on each")


def test_counts_what_real_arrays_take():
    """Bytes by role equal those on the first of eight devices."""
    plan = plan_tiny()
    mesh = build_mesh(ParallelLayout.from_config(TINY_LAYOUT), jax.devices()[:8])
    actor = Actor(
        TINY,
        mesh,
        train=TINY_TRAIN,
        optim=OptimConfig(),
        engine=TINY_ENGINE,
        temperature=1.0,
        seed=0,
    )
    actor.init()

    def on_first_device(tree) -> int:
        return sum(a.addressable_shards[0].data.nbytes for a in jax.tree.leaves(tree))

    real = {
        "actor in training": actor.state.params,
        "optimiser state": actor.state.opt_state,
        "KV cache and slots": actor.engine.init_decode_state(),
    }
    for name, arrays in real.items():
        assert holding(plan, name).bytes_per_device == on_first_device(arrays), name


def test_weights_that_need_not_move_are_counted_once():
    alone = plan_tiny(layout=ParallelLayout.from_config(LayoutConfig()))
    assert holding(alone, "actor in generation").bytes_per_device == 0
    half = dataclasses.replace(TINY_ENGINE, dtype=jnp.bfloat16)
    alone = plan_tiny(layout=ParallelLayout.from_config(LayoutConfig()), engine=half)
    assert holding(alone, "actor in generation").bytes_per_device == TINY.num_params * 2


def test_remat_shows_in_what_is_kept():
    kept = {
        remat: holding(
            plan_tiny(train=dataclasses.replace(TINY_TRAIN, remat=remat)), "kept of the layers"
        ).num_values
        for remat in ("full", "projections", "none")
    }
    # [L, R, T, D]
    assert kept["full"] == 4 * 4 * 16 * 32
    assert kept["full"] < kept["projections"] < kept["none"]


def test_what_does_not_divide_is_refused():
    with pytest.raises(UserError, match="9"):
        plan_tiny(engine=dataclasses.replace(TINY_ENGINE, slots=9))
    with pytest.raises(UserError, match="3"):
        plan_tiny(flow=dataclasses.replace(TINY_FLOW, shape=PackedShape(4, 2, 3, 16)))


def test_plain_text_is_one_table_without_control_characters(recipe):
    text = text_of(recipe)
    assert text.isascii() and "\x1b" not in text
    assert text.count("role or event") == 1
    assert "128 devices, training 1-8-16 fsdp 16, generation 1-4-2-16" in text.splitlines()[0]
    # Not wrapped: every line of the table is as wide as the first.
    assert len({len(line.rstrip()) for line in text.splitlines()[1:] if line.strip()}) == 1


def test_a_terminal_gets_the_table_in_its_own_width(recipe):
    out = io.StringIO()
    recipe.show(Console(file=out, force_terminal=True, width=90))
    assert "╭" in out.getvalue()


@pytest.mark.parametrize(
    ("slots", "phrase"),
    [(384, "may fit A100 40 GB or more"), (32 * 400, "does not fit TPU v7 or less")],
)
def test_says_which_devices_may_hold_it(slots, phrase):
    config = load_config(Config, str(RECIPE), {"rollout.slots": str(slots)})
    assert phrase in text_of(plan_recipe(config))


def test_a_pipeline_is_counted_by_its_stages():
    layout = ParallelLayout.from_config(LayoutConfig(train="2-2-2", generate="2-2-1-2", fsdp=2))
    plan = plan_tiny(layout=layout)
    # Two stages of two layers; 4 rows over 2 shards in 2 microbatches, so in 3 ticks a stage keeps what goes
    # into each of its layers and what comes out of the last, of one row of T x D = 16 x 32 float32.
    # Angles and masks of its rows come on top.
    kept = 3 * (2 + 1) * 16 * 32 * 4
    assert kept < holding(plan, "kept of the layers").bytes_per_device < 1.1 * kept
    flow = dict(plan.flow)
    assert flow["pipeline, learning"] == (
        "2 stages x 2 microbatches of 2 rows: idle for 33% of the time"
    )
    assert flow["pipeline, prefill"].startswith("2 stages x 2 microbatches of 2 rows")
    assert flow["pipeline, decoding"].startswith("2 stages x 2 microbatches of 4 rows")
    assert "pipeline, learning" not in dict(plan_tiny().flow)
