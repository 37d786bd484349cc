"""Reads the layers with a sliding window from config.json, and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl.checks import MAX_LAYERS
from jaxrl.errors import UserError
from jaxrl.models.huggingface.architectures import Architecture, WindowKeys
from jaxrl.models.huggingface.json_values import boolean, integer, shown
from jaxrl.models.model_config import ModelConfig

_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}

# Defaults of the classes of Transformers for missing keys.
_MISTRAL_WINDOW, _QWEN_WHOLE_LAYERS = 4096, 28


def read_windows(
    values: Mapping[str, Any], architecture: Architecture, origin: str
) -> tuple[int, tuple[str, ...]]:
    """The `sliding_window` and `layer_pattern` of the model that a config.json describes.

    Many files contain a window that no layer uses; the result is then 0.

    Raises:
      UserError: the decoder or the architecture does not support a kind of layer.
    """
    num_layers = integer(values, "num_hidden_layers", origin)
    if num_layers > MAX_LAYERS:
        raise UserError(
            f"{origin}: num_hidden_layers is {num_layers}, above {MAX_LAYERS:,}; copy the published "
            "file again"
        )
    sliding = _sliding(values, architecture, num_layers, origin)
    if not any(sliding):
        return 0, ("full",)
    is_mistral = architecture.windows is WindowKeys.NUMBER
    absent = _MISTRAL_WINDOW if is_mistral else None
    return integer(values, "sliding_window", origin, absent=absent), _shortest_pattern(sliding)


def window_values(config: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """The keys of a config.json that give the layers of `config` their windows in `architecture`."""
    sliding = config.sliding_layers
    types = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    window = config.sliding_window or None
    match architecture.windows:
        case WindowKeys.NUMBER:
            return {"sliding_window": window}
        case WindowKeys.LAYER_TYPES:
            pattern = _period_of_gemma(sliding)
            older = {} if pattern is None else {"sliding_window_pattern": pattern}
            return {"sliding_window": window, "layer_types": types, **older}
        case WindowKeys.SWITCH if window:
            first = sliding.index(True)
            older = {"max_window_layers": first} if all(sliding[first:]) else {}
            return {
                "use_sliding_window": True,
                "sliding_window": window,
                "layer_types": types,
                **older,
            }
        case WindowKeys.SWITCH_FOR_ALL if window:
            return {"use_sliding_window": True, "sliding_window": window}
        case _:
            return {"use_sliding_window": False}


def _sliding(
    values: Mapping[str, Any], architecture: Architecture, num_layers: int, origin: str
) -> list[bool]:
    listed = _listed(values, num_layers, origin)
    keys = architecture.windows
    if keys is WindowKeys.LAYER_TYPES:
        period = integer(
            values, "sliding_window_pattern", origin, absent=architecture.window_pattern
        )
        return listed or [bool((i + 1) % period) for i in range(num_layers)]
    switched_on = (
        # Null turns the window off; a missing key means the default.
        values.get("sliding_window", _MISTRAL_WINDOW) is not None
        if keys is WindowKeys.NUMBER
        else boolean(values, "use_sliding_window", origin)
    )
    if not switched_on:
        _check_agrees(listed, [False] * num_layers, origin)
        return [False] * num_layers
    if keys is WindowKeys.SWITCH:
        whole = values.get("max_window_layers", _QWEN_WHOLE_LAYERS)
        if not isinstance(whole, int) or whole < 0:
            raise UserError(
                f"{origin}: max_window_layers is {shown(whole)}; it must be a number of layers"
            )
        return listed or [i >= whole for i in range(num_layers)]
    if keys is WindowKeys.NONE:
        raise UserError(
            f"{origin}: use_sliding_window is true, but {architecture.language_model} attends to the whole "
            "past; write false there"
        )
    _check_agrees(listed, [True] * num_layers, origin)
    return [True] * num_layers


def _listed(values: Mapping[str, Any], num_layers: int, origin: str) -> list[bool] | None:
    """The sliding layers according to `layer_types`; None if the key is missing."""
    kinds = values.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list):
        raise UserError(f"{origin}: layer_types is {shown(kinds)}; it must be a list")
    others = sorted({str(kind) for kind in kinds} - _LAYER_TYPES.keys())
    if others:
        raise UserError(
            f"{origin}: layer_types has {', '.join(others)[:80]}, but only {' and '.join(_LAYER_TYPES)} "
            "are supported; choose a checkpoint without it"
        )
    if len(kinds) != num_layers:
        raise UserError(
            f"{origin}: layer_types names {len(kinds)} layers of num_hidden_layers {num_layers}; copy the "
            "published config.json"
        )
    return [_LAYER_TYPES[kind] for kind in kinds]


def _check_agrees(listed: list[bool] | None, sliding: list[bool], origin: str) -> None:
    if listed is not None and listed != sliding:
        kind = "full_attention" if all(sliding) else "sliding_attention"
        raise UserError(
            f"{origin}: layer_types has {kind}, but use_sliding_window and sliding_window say otherwise; "
            "copy the published config.json"
        )


def _shortest_pattern(sliding: Sequence[bool]) -> tuple[str, ...]:
    """The shortest pattern that repeats over all layers."""
    length = next(
        n
        for n in range(1, len(sliding) + 1)
        if all(sliding[i] == sliding[i % n] for i in range(len(sliding)))
    )
    return tuple("sliding" if slides else "full" for slides in sliding[:length])


def _period_of_gemma(sliding: Sequence[bool]) -> int | None:
    """The n for which exactly every n-th layer has full attention; None if there is none."""
    for n in range(1, len(sliding) + 2):
        if all(slides == bool((i + 1) % n) for i, slides in enumerate(sliding)):
            return n
    return None
