"""Converts a GGUF file (llama.cpp) to a Hugging Face directory, without torch and without Transformers.

    GGUF                        Hugging Face directory
    llama.* keys                config.json
    blk.0.attn_q.weight, ...    model.safetensors, dequantised to float32
    tokenizer.ggml.* keys       tokenizer.json, tokenizer_config.json, generation_config.json
    tokenizer.chat_template     chat_template.jinja

Covered are Llama models with a byte-level BPE tokenizer that splits digits (SmolLM2). Other architectures,
other tokenizers and scaled rotary embeddings are refused.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl.errors import UserError
from jaxrl.files import check_file
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.model_files import SINGLE_FILE, new_directory, write_json
from jaxrl.models.huggingface.weight_table import weight_table
from jaxrl.models.model_config import ModelConfig

_ARCHITECTURE = "llama"
# Names of llama.cpp: the family of tokenizers, and how text is split before merges are applied.
_TOKENIZER, _SPLIT = "gpt2", "smollm"
_ABSENT = "name a .gguf file"
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def gguf_to_hf(path: str | pathlib.Path, out: str | pathlib.Path) -> None:
    """Writes a directory that jaxrl and Transformers load. It appears complete or not at all.

    Args:
      path: the GGUF file.
      out: the new directory; must not exist yet.

    Raises:
      UserError: the file is not readable, holds a model that is not covered, or `out` exists.
    """
    check_file(path, absent=_ABSENT)
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise UserError(
            f"{path} is no complete GGUF file ({error}); copy the published file again"
        ) from error
    keys = {name: field.contents() for name, field in reader.fields.items()}
    _check_covered(path, reader, keys)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with new_directory(out) as partial:
        write_json(partial / "config.json", _config_json(keys, tied="output.weight" not in stored))
        config = read_config(partial)
        tensors = dict(_tensors(path, stored, config))
        safetensors.numpy.save_file(tensors, partial / SINGLE_FILE, metadata={"format": "pt"})
        # safetensors writes files that only the owner can read. Give them the usual permissions.
        (partial / SINGLE_FILE).chmod((partial / "config.json").stat().st_mode)
        _write_tokenizer(keys, partial)


def _check_covered(path: str | pathlib.Path, reader: gguf.GGUFReader, keys: dict[str, Any]) -> None:
    """Raises UserError unless architecture, rotary embedding and tokenizer are covered."""
    found = {
        "general.architecture": _ARCHITECTURE,
        "tokenizer.ggml.model": _TOKENIZER,
        "tokenizer.ggml.pre": _SPLIT,
    }
    for key, covered in found.items():
        if keys.get(key) != covered:
            raise UserError(
                f"{path} has {key} {keys.get(key)!r}, and only {covered!r} is read; take the model's Hugging "
                "Face directory instead"
            )
    scaled = [key for key in keys if key.startswith(f"{_ARCHITECTURE}.rope.scaling.")]
    scaled += [tensor.name for tensor in reader.tensors if tensor.name == "rope_freqs.weight"]
    if scaled:
        raise UserError(
            f"{path} has {scaled[0]}, and scaled rotary embeddings are not read; take the model's Hugging "
            "Face directory instead"
        )


def _config_json(keys: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    def of_model(name: str) -> Any:
        return keys[f"{_ARCHITECTURE}.{name}"]

    def short(name: str) -> float:
        # GGUF stores float32: 9.999999747378752e-06 was 1e-05.
        return float(str(np.float32(of_model(name))))

    heads, width = of_model("attention.head_count"), of_model("embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(keys["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": of_model("feed_forward_length"),
        "num_hidden_layers": of_model("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": of_model("attention.head_count_kv"),
        "head_dim": width // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": of_model("context_length"),
        "rms_norm_eps": short("attention.layer_norm_rms_epsilon"),
        "rope_theta": short("rope.freq_base"),
        "tie_word_embeddings": tied,
        "bos_token_id": keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": keys["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
    }


def _tensors(
    path: str | pathlib.Path, stored: dict[str, gguf.ReaderTensor], config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields every tensor of the Hugging Face checkpoint, by name, in float32."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for row in weight_table(config):
        for position in row.positions():
            name = row.tensor_name(position)
            theirs = names.get_name(name, try_suffixes=(".weight",))
            if theirs not in stored:
                raise UserError(f"{path} has no tensor {theirs}; copy the published file again")
            tensor = stored[theirs]
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
            if values.shape != row.tensor_shape:
                raise UserError(
                    f"{path} has {theirs} of shape {values.shape} and not {row.tensor_shape}; copy "
                    "the published file again"
                )
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                values = _halves_apart(values, config.head_dim)
            yield name, np.ascontiguousarray(values, np.float32)


def _halves_apart(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders rows of q or k, [heads * H, D]: llama.cpp rotates neighbours, Transformers the two halves."""
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[-1])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_tokenizer(keys: dict[str, Any], folder: pathlib.Path) -> None:
    texts: Sequence[str] = keys["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in keys["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE({text: i for i, text in enumerate(texts)}, merges, fuse_unk=False)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text, kind in zip(texts, keys["tokenizer.ggml.token_type"], strict=True)
            if kind == gguf.TokenType.CONTROL
        ]
    )
    backend.save(str(folder / "tokenizer.json"))
    named = {
        f"{ours}_token": texts[keys[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in _SPECIAL_TOKENS.items()
        if f"tokenizer.ggml.{theirs}_token_id" in keys
    }
    write_json(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    )
    write_json(
        folder / "generation_config.json", {"eos_token_id": keys["tokenizer.ggml.eos_token_id"]}
    )
    if template := keys.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
