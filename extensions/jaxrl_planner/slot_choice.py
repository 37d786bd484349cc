"""Chooses the number of slots that fit: `rollout.slots = "auto"` fills `rollout.memory_fraction` of a device.

    memory x fraction - resident buffers in sampling - largest temporary = slots x bytes of a slot

The first estimate is counted from shapes, with temporaries as measured on compiled programs. If a compiler is
available, its figures for programs with that many slots refine the estimate.

With a paged cache a slot is memory for one sequence of full length, as pages. Several samples share it: as
many as fit at the length that samples are taken to have while they decode (`Workload.slot_tokens`).

With more agents than slots, `rollout.cache_tokens = 0` is chosen in the same way: room for the conversations
of all agents, or as many as fit, so that those whose tools run stay known.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl.config.schema import Config
from jaxrl.errors import UserError
from jaxrl.mesh import hosts
from jaxrl.mesh.devices import memory_bytes
from jaxrl.mesh.rules import GENERATE_RULES, shards_of
from jaxrl.rollout.engine_sizes import MOST_PAGE_TOKENS, round_up
from jaxrl.trainer.open_settings import chooses_slots
from jaxrl.trainer.resolved import Resolved
from jaxrl.trainer.roles import Meshes
from jaxrl_planner.compiled.ahead import co_resident_bytes, peak_here
from jaxrl_planner.compiled.programs import CACHE, Program, sampling_programs
from jaxrl_planner.memory import ResidentBuffers, phase_bytes
from jaxrl_planner.planned_roles import PlannedRoles, meshes_on, planned_roles
from jaxrl_planner.step_load import load_of

# Copies of a prefill batch that an insert makes: 1 on TPUs, 1.5 on GPUs.
_INSERTED_COPIES = 1.5
# Float32 arrays [V] per slot that a dispatch holds at once, split over the vocabulary. Compiled for an H100
# they are at most seven.
_LOGITS_COPIES = 8
# Maximum number of slot counts to compile; three were enough in all trials.
_TRIES = 6

# (program, its mesh, resident buffers) -> peak bytes of a device, with the resident buffers.
Compile = Callable[[Program, Any, Sequence[ResidentBuffers]], int]


def with_slots(
    resolved: Resolved, meshes: Meshes, memory: int, compile: Compile | None = None
) -> Resolved:
    """Returns the config with the number of slots that fit; unchanged if it has one.

    Args:
      resolved: config of the run, with what its names stand for.
      meshes: mesh of each role; with `compile` on devices that can be compiled for.
      memory: bytes of a device.
      compile: function that compiles the sampling programs, called for several numbers of slots; None
        estimates them from shapes.

    Raises:
      UserError: not even one slot fits, or a mesh does not divide a batch.
    """
    if not chooses_slots(resolved.config):
        return resolved
    choice = _Choice(resolved, meshes, memory)
    if resolved.config.rollout.slots != "auto":
        config = choice.with_known_pages()
    else:
        config = choice.config(choice.counted() if compile is None else choice.compiled(compile))
    return dataclasses.replace(resolved, config=config)


def with_chosen_slots(resolved: Resolved, devices: Sequence[Any]) -> Config:
    """Returns the config with the slots that fit the devices of a run, by their compiler. Collective."""
    config = resolved.config
    if not chooses_slots(config):
        return config
    slots = config.rollout.slots
    # Each process sees only the memory of its own devices; all must choose the same number.
    memory = hosts.on_first(lambda: memory_bytes(jax.local_devices()[0]))

    def compile_here(program: Program, _: Any, buffers: Sequence[ResidentBuffers]) -> int:
        peak = peak_here(program)
        return hosts.on_first(lambda: peak) + co_resident_bytes(program, buffers)

    meshes = meshes_on(resolved.pools, devices)
    config = with_slots(resolved, meshes, memory, compile_here).config
    if hosts.is_first():
        share = f"{config.rollout.memory_fraction:g} of a device's {memory / 1e9:.1f} GB"
        name = "slots" if slots == "auto" else "cache_tokens"
        chosen = f"rollout.{name}: {getattr(config.rollout, name):,}"
        print(f"{chosen}, as many as {share} holds or a step has samples")
    return config


def most_that_fit(
    bytes_with: Callable[[int], float], memory: float, *, first: int, most: int, slot: float
) -> int:
    """The largest tried number of slots whose programs fit; 0 if none does.

    Args:
      bytes_with: function from a number of slots to bytes, nearly linear. It compiles, so it is called
        rarely.
      memory: available bytes.
      first: number of slots to try first.
      most: largest useful number.
      slot: lower bound of the bytes of one more slot.
    """
    # Bytes are nearly linear in slots, so a secant finds the largest number in a few compilations.
    known: dict[int, float] = {}
    slots, fit, too_many = min(first, most), 0, most + 1
    while slots > fit and len(known) < _TRIES:
        known[slots] = bytes_with(slots)
        spare = memory - known[slots]
        fit, too_many = (slots, too_many) if spare >= 0 else (fit, slots)
        # Temporaries grow too; the last two measurements give the slope.
        (a, x), (b, y) = (list(known.items()) * 2)[-2:]
        each = max(slot, (y - x) / (b - a) if b != a else slot)
        slots = min(max(slots + math.floor(spare / each), 1), too_many - 1)
    return fit


class _Choice:
    """The number of slots of a replica, for one config and memory."""

    def __init__(self, resolved: Resolved, meshes: Meshes, memory: int):
        self._resolved = resolved
        self._config = config = resolved.config
        self._meshes = meshes
        sampler = meshes.get("rollout", meshes["actor"])
        self._replicas = shards_of("batch", GENERATE_RULES, sampler)
        self._parts_of_logits = shards_of("vocab", GENERATE_RULES, sampler)
        self._load = load_of(config)
        rollout = config.rollout
        # Tokens of a slot of full length, in whole pages.
        tokens = config.data.max_prompt_tokens + rollout.max_response_tokens
        tokens += rollout.tokens_per_dispatch
        self._longest = -(-tokens // MOST_PAGE_TOKENS) * MOST_PAGE_TOKENS
        self._samples_per_slot = 1
        if rollout.cache == "paged":
            if rollout.cache_tokens:
                raise UserError(
                    'rollout.slots "auto" chooses the pages too, and rollout.cache_tokens is '
                    f"{rollout.cache_tokens:,}; set it to 0, or rollout.slots to a number"
                )
            # They share the pages of a sequence of full length.
            self._samples_per_slot = math.floor(self._longest / self._load.work.slot_tokens)
        # More slots than a replica can use.
        most = math.ceil(self._load.prompts * self._load.samples / self._replicas)
        self._most = math.ceil(most / self._samples_per_slot)
        self._memory = memory * rollout.memory_fraction
        # The fewest that an engine takes.
        self._fewest = 2 if rollout.deterministic else 1
        self._least = self._roles(self._fewest)
        buffers = self._least.resident_buffers(self._least.pool_of("rollout"))
        cache = next(h for h in buffers if h.name == CACHE or h.name.endswith("cache and slots"))
        # All weights that agents ask have as many.
        weights = 1 + len({*rollout.frozen_roles.values()})
        self._slot = cache.bytes_per_device * weights / self._fewest
        self._room = self._memory - phase_bytes(buffers, "sampling") + self._fewest * self._slot

    def config(self, slots: int) -> Config:
        """The config with this many slots per replica; raises UserError for 0."""
        rollout = self._config.rollout
        if not slots:
            raise UserError(
                'rollout.slots "auto" takes as many slots as fit, and none does: rollout.memory_fraction '
                f"{rollout.memory_fraction:g} of a device is {self._memory / 1e9:.1f} GB, of which weights "
                f"leave {self._room / 1e9:.1f} for the programs and a slot of {self._slot / 1e9:.2f}; raise "
                "t_g of mesh.generate, or lower rollout.prefill_prompts or rollout.max_response_tokens"
            )
        all_slots = slots * self._replicas
        pages = {"cache_tokens": all_slots * self._longest} if rollout.cache == "paged" else {}
        rollout = dataclasses.replace(rollout, slots=all_slots * self._samples_per_slot, **pages)
        return dataclasses.replace(self._config, rollout=rollout)

    def with_known_pages(self) -> Config:
        """The config whose cache has room for as many conversations as fit, if these are more than slots."""
        rollout, most = self._config.rollout, self.counted() * self._replicas
        assert rollout.slots != "auto", "the slots are given"
        if most <= rollout.slots:
            return self._config
        tokens = most * (self._config.longest_sequence + rollout.tokens_per_dispatch)
        rollout = dataclasses.replace(rollout, cache="paged", cache_tokens=tokens)
        return dataclasses.replace(self._config, rollout=rollout)

    def counted(self) -> int:
        """The number that fits by the formula in the module docstring."""
        engine = self._least.engine
        tokens = round_up(engine.prompt_sizes, engine.config.max_prompt_tokens)
        prefix = self._slot * engine.batch_sizes[-1] * tokens / engine.cache_sizes[-1]
        inserted = _INSERTED_COPIES * prefix
        logits = 4 * self._least.models.actor.vocab_size // self._parts_of_logits
        logits *= _LOGITS_COPIES * self._samples_per_slot
        # An insert and a decoding step never run together: the larger of both counts.
        fitting = min((self._room - inserted) // self._slot, self._room // (self._slot + logits))
        return int(max(0, min(fitting, self._most)))

    def compiled(self, compile: Compile) -> int:
        """The number that fits by the compiler's figures."""

        def most_bytes(slots: int) -> int:
            roles = self._roles(max(slots, self._fewest))
            buffers = roles.resident_buffers(roles.pool_of("rollout"))
            programs = sampling_programs(roles.roles.actor, roles.engine, self._load)
            mesh = roles.engine.mesh
            return max(compile(p, mesh, buffers) for p in programs if p.phase == "sampling")

        first = max(1, self.counted())
        return most_that_fit(
            most_bytes, self._memory, first=first, most=self._most, slot=self._slot
        )

    def _roles(self, slots: int) -> PlannedRoles:
        resolved = dataclasses.replace(self._resolved, config=self.config(slots))
        return planned_roles(resolved, self._meshes)
