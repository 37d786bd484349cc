"""The tokenizer of a GGUF file, as the files of a Hugging Face directory.

    tokenizer.ggml.model "gpt2"     byte-level BPE: tokens, merges, and `pre`, the name of a way to split text
    tokenizer.ggml.model "llama"    SentencePiece BPE: tokens with scores, "▁" for spaces, rare bytes

GGUF names the way to split text and does not describe it. `_SPLITS` has the names of which the published
tokenizer.json is known; others are refused, since another split gives other tokens.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import gguf
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxrl.errors import UserError
from jaxrl.models.huggingface.gguf_config import REMEDY
from jaxrl.models.huggingface.json_values import shown
from jaxrl.models.huggingface.model_files import write_json

_TYPES = gguf.TokenType
_SPACE = "▁"
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
# Ends of a turn. Like llama.cpp, an answer ends there too, because files often name only one end.
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")


@dataclasses.dataclass(frozen=True)
class _Split:
    """A published way to split text before merges are applied.

    Attributes:
      pattern: regular expression of the parts; empty for that of GPT-2.
      digits: True if each digit is split off before.
      composed: True if text is brought to Unicode's form NFC.
      whole_parts: True if a part that is a token needs no merges.
      begins: True if a text begins with the bos token where the file does not say.
    """

    pattern: str = ""
    digits: bool = False
    composed: bool = False
    whole_parts: bool = False
    begins: bool = False


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _Split(_WORDS.format(numbers=r"\p{N}{1,3}"), whole_parts=True, begins=True)
_SINGLE_DIGITS = _Split(digits=True)
_SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Split(_WORDS.format(numbers=r"\p{N}"), composed=True),
    "refact": _SINGLE_DIGITS,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "tekken": _Split(_CASED_WORDS, whole_parts=True, begins=True),
}


def write_tokenizer(keys: Mapping[str, Any], folder: pathlib.Path, origin: str) -> None:
    """Writes tokenizer.json, tokenizer_config.json, generation_config.json and the chat template.

    Args:
      keys: keys of the GGUF file with their values.
      folder: directory to write to.
      origin: path of the GGUF file, for messages.

    Raises:
      UserError: the tokenizer is not covered, or a key is missing or malformed.
    """
    tokens, kinds = _tokens(keys, origin)
    make = {"gpt2": _byte_level, "llama": _sentence_piece}
    model = keys.get("tokenizer.ggml.model")
    # Compare with a tuple, since the value of an untrusted file may not be hashable.
    if model not in tuple(make):
        raise UserError(
            f"{origin} has tokenizer.ggml.model {shown(model)}, and only {', '.join(make)} are read; {REMEDY}"
        )
    special = _special_ids(keys, tokens, origin)
    if "eos" not in special:
        raise UserError(
            f"{origin} has no tokenizer.ggml.eos_token_id, so a response could never end; {REMEDY}"
        )
    backend, begins = make[model](keys, tokens, kinds, origin)
    _add_tokens(backend, tokens, kinds)
    if keys.get("tokenizer.ggml.add_bos_token", begins) and "bos" in special:
        bos = tokens[special["bos"]]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0",
            pair=f"{bos}:0 $A:0 {bos}:1 $B:1",
            special_tokens=[(bos, special["bos"])],
        )
    backend.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": tokens[i] for name, i in special.items()}
    write_json(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    )
    turns = [
        i
        for i, text in enumerate(tokens)
        if text in _ENDS and kinds[i] == _TYPES.CONTROL and i != special["eos"]
    ]
    ends = [special["eos"], *turns] if turns else special["eos"]
    write_json(folder / "generation_config.json", {"eos_token_id": ends})
    if template := keys.get("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(str(template), encoding="utf-8")


def _tokens(keys: Mapping[str, Any], origin: str) -> tuple[Sequence[str], Sequence[int]]:
    """Texts and types of all tokens, by id."""
    tokens = _list(keys, "tokenizer.ggml.tokens", str, origin)
    kinds = _list(keys, "tokenizer.ggml.token_type", int, origin)
    if len(tokens) != len(kinds):
        raise UserError(
            f"{origin} has {len(tokens)} tokens and {len(kinds)} types of tokens; copy the published file "
            "again"
        )
    return tokens, kinds


def _list(keys: Mapping[str, Any], key: str, kind: type, origin: str) -> list[Any]:
    value = keys.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, kind) for entry in value):
        raise UserError(
            f"{origin}: {key} is {shown(value)}; it must be a list of {kind.__name__}: copy the published "
            "file again"
        )
    return value


def _special_ids(keys: Mapping[str, Any], tokens: Sequence[str], origin: str) -> dict[str, int]:
    """Ids of the special tokens by their names."""
    result = {}
    for name, theirs in _SPECIAL_TOKENS.items():
        token = keys.get(key := f"tokenizer.ggml.{theirs}_token_id")
        if token is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise UserError(
                f"{origin}: {key} is {shown(token)}, and ids go from 0 to {len(tokens) - 1}; copy the "
                "published file again"
            )
        result[name] = token
    return result


def _byte_level(
    keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], origin: str
) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE, and whether a text begins with the bos token by default."""
    name = keys.get("tokenizer.ggml.pre")
    if name not in tuple(_SPLITS):
        raise UserError(
            f"{origin} has tokenizer.ggml.pre {shown(name)}, and only {', '.join(_SPLITS)} are read; {REMEDY}"
        )
    split = _SPLITS[name]
    merges = [tuple(pair.split(" ")) for pair in _list(keys, "tokenizer.ggml.merges", str, origin)]
    backend = _backend(
        origin,
        vocab=_vocabulary(tokens, kinds),
        merges=merges,
        ignore_merges=split.whole_parts,
        fuse_unk=False,
    )
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split.pattern))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split.composed:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, split.begins


def _sentence_piece(
    keys: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int], origin: str
) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece BPE; a text begins with the bos token by default."""
    scores = _list(keys, "tokenizer.ggml.scores", float, origin)
    if len(scores) != len(tokens):
        raise UserError(
            f"{origin} has {len(tokens)} tokens and {len(scores)} scores; copy the published file again"
        )
    unknown = _special_ids(keys, tokens, origin).get("unk", 0)
    backend = _backend(
        origin,
        vocab=_vocabulary(tokens, kinds),
        merges=_merges_by_score(tokens, kinds, scores),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefixed = keys.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    )
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        undo.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(undo)
    return backend, True


def _backend(origin: str, **settings: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(**settings))
    except Exception as error:  # the library raises bare Exception and nothing narrower
        raise UserError(
            f"{origin} has merges that do not fit its tokens ({error}); copy the published file again"
        ) from error


def _vocabulary(tokens: Sequence[str], kinds: Sequence[int]) -> dict[str, int]:
    # Unused tokens are names for padding rows of the embedding, such as "[PAD151700]".
    return {text: i for i, text in enumerate(tokens) if kinds[i] != _TYPES.UNUSED}


def _merges_by_score(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All pairs of tokens that make up a token, the best result first, as SentencePiece merges."""
    whole = {text: scores[i] for i, text in enumerate(tokens) if kinds[i] == _TYPES.NORMAL}
    merges = [
        (-score, -cut, text[:cut], text[cut:])
        for text, score in whole.items()
        for cut in range(1, len(text))
        if text[:cut] in whole and text[cut:] in whole
    ]
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Marks the tokens that are found in a text before it is split."""
    for found, special in (
        ((_TYPES.CONTROL, _TYPES.UNKNOWN), True),
        ((_TYPES.USER_DEFINED,), False),
    ):
        added = [
            tokenizers.AddedToken(text, special=special, normalized=False)
            for text, kind in zip(tokens, kinds, strict=True)
            if kind in found
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
