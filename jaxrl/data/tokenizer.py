"""Tokenizers: read from a local Hugging Face directory, or a small one trained on the problems.

Only `tokenizers` and `jinja2` are needed. Directories with SentencePiece alone (`tokenizer.model` without
`tokenizer.json`) are not supported; save them once with a fast tokenizer.

    file of the directory     content
    tokenizer.json            vocabulary, merges, normalisation
    tokenizer_config.json     eos_token, pad_token, chat_template
    chat_template.jinja       optional; with additional_chat_templates/NAME.jinja, wins over the key above
    chat_template.json        optional, chat_template: read if there is no other
    generation_config.json    optional, eos_token_id: every token that ends a response
    config.json               the same, where generation_config.json has none; also in its text_config

The last two belong to the model, and are read in its directory if that is another one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxrl.data.chat import ChatTemplate
from jaxrl.errors import UserError
from jaxrl.files import read_bytes, read_json_object, read_text
from jaxrl.hub.hub_names import fetch_hint

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"

# How byte-level tokenizers, since GPT-2, write bytes as characters: those that can be printed as themselves.
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
_BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}

# Texts that are encoded in parallel; enough for many cores.
_TEXTS_AT_ONCE = 8192


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to int32 ids and back.

    Attributes:
      backend: The `tokenizers` object.
      vocab_size: Largest id + 1, added tokens included. A model's embedding may have more rows; the sampler
        must not draw them, and `decode` drops them.
      eos_id: The token that ends a response in training data.
      stop_ids: All tokens that end generation, `eos_id` first.
      special_tokens: Special tokens by their names in tokenizer_config.json, such as {"eos_token": "<eos>"}.
      chat_template: The chat template; None if the model has none (base models).
    """

    backend: tokenizers.Tokenizer
    vocab_size: int
    eos_id: int
    stop_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    chat_template: ChatTemplate | None = None

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """All texts that `encode` reads as one token in any context, such as "<|im_end|>"."""
        return tuple(str(token) for token in self.backend.get_added_tokens_decoder().values())

    @functools.cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of all special tokens, by their names in prompts."""
        added = self.backend.get_added_tokens_decoder().items()
        return {token.content: i for i, token in added if token.special and token.content}

    def ids_named_by(self, stop_strings: Sequence[str]) -> tuple[int, ...]:
        """The ids of stop strings that are special tokens. `decode` leaves these out, so no text has them.

        Raises:
          UserError: a stop string has a special token and other text.
        """
        for text in stop_strings:
            inside = [name for name in self.special_ids if name in text]
            if inside and text not in self.special_ids:
                raise UserError(
                    f"the stop string {text!r} has other text beside the special token {inside[0]!r}, and no "
                    f"answer's text has special tokens; use {inside[0]!r} alone"
                )
        named = dict.fromkeys(self.special_ids.get(text, -1) for text in stop_strings)
        return tuple(i for i in named if i >= 0)

    def encode(self, text: str) -> np.ndarray:
        """The int32 [T] ids of `text`. It adds no tokens; special tokens in the text become their ids."""
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_batch(self, texts: Sequence[str]) -> tuple[np.ndarray, ...]:
        """Encodes every text, on all cores."""
        ids: list[np.ndarray] = []
        # In blocks, because the library's encodings take much more memory than the ids.
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            part = list(texts[start : start + _TEXTS_AT_ONCE])
            # The fast one leaves out offsets, which nothing here reads.
            encodings = self.backend.encode_batch_fast(part, add_special_tokens=False)
            ids += [np.array(encoding.ids, np.int32) for encoding in encodings]
        return tuple(ids)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, without special tokens and unknown ids."""
        return self.backend.decode(self._known(ids), skip_special_tokens=True)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token's text, also of one that is no whole character; none for special tokens."""
        text = self.decode([token])
        if _BROKEN not in text:
            return text.encode()
        name = self.backend.id_to_token(token) or ""
        if found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", name):  # as SentencePiece writes it
            return bytes.fromhex(found[1])
        if all(character in _BYTE_OF for character in name):
            return bytes(_BYTE_OF[character] for character in name)
        return text.encode()

    def decode_batch(self, sequences: Sequence[Sequence[int] | np.ndarray]) -> list[str]:
        """Decodes every sequence, on all cores. Other threads run meanwhile."""
        if len(sequences) == 1:
            return [self.decode(sequences[0])]  # without the cost of a thread pool
        return self.backend.decode_batch([*map(self._known, sequences)], skip_special_tokens=True)

    def _known(self, ids: Sequence[int] | np.ndarray) -> list[int]:
        array = np.asarray(ids, np.int64)
        return array[(array >= 0) & (array < self.vocab_size)].tolist()

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """Renders a conversation by the model's chat template; see `ChatTemplate.render`."""
        if self.chat_template is None:
            raise UserError(
                "this tokenizer has no chat template, so it cannot render a conversation; put a "
                "chat_template.jinja into its directory, name one (tokenizer.chat_template; --chat_template "
                "of a server), or give plain text (data.chat=False, /v1/completions)"
            )
        return self.chat_template.render(messages, **options)

    def save(self, directory: str | pathlib.Path) -> None:
        """Writes the files that `load_tokenizer` reads.

        They are tokenizer.json, tokenizer_config.json and, if several tokens end a response,
        generation_config.json.
        """
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self.backend.save(str(directory / "tokenizer.json"))
        config: dict[str, Any] = dict(self.special_tokens)
        if self.chat_template is not None and (named := self.chat_template.sources):
            config["chat_template"] = (
                named["default"]
                if named.keys() == {"default"}
                else [{"name": name, "template": source} for name, source in named.items()]
            )
        contents = {"tokenizer_config": config}
        if len(self.stop_ids) > 1:
            contents["generation_config"] = {"eos_token_id": list(self.stop_ids)}
        for name, content in contents.items():
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (directory / f"{name}.json").write_text(text, encoding="utf-8")


def load_tokenizer(
    directory: str | pathlib.Path,
    *,
    chat_template: str | pathlib.Path = "",
    model: str | pathlib.Path = "",
) -> Tokenizer:
    """Reads the tokenizer of a local Hugging Face directory.

    Args:
      directory: the directory.
      chat_template: file with the chat template, or the name of one of the directory's; "" chooses among
        these as Transformers does.
      model: the directory of the model, which may be another one; "" is `directory`.

    Raises:
      UserError: A file is missing or broken, or none names an end-of-sequence token.
    """
    directory = pathlib.Path(directory)
    backend = _read_backend(directory / "tokenizer.json")
    path = directory / "tokenizer_config.json"
    config = _read_json(path)
    # A token is a text or {"content": text}. `add_bos_token: true` has the same ending but is not a token; a
    # missing token may be null.
    more = config.get("extra_special_tokens")
    named = {
        **{key: value for key, value in config.items() if key.endswith("_token")},
        # Those of one model, with names for its template.
        **(more if isinstance(more, dict) else {}),
    }
    contents = {k: v.get("content") if isinstance(v, dict) else v for k, v in named.items()}
    special_tokens = {k: content for k, content in contents.items() if isinstance(content, str)}
    ids = {name: backend.token_to_id(token) for name, token in special_tokens.items()}
    if (eos := special_tokens.get("eos_token")) is not None and ids["eos_token"] is None:
        raise UserError(
            f"{path} names the token {eos!r}, which tokenizer.json beside it does not have; put two files of "
            "one model there"
        )
    # Not the number of entries, because some vocabularies have unused ids below the last one.
    vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
    ends = _ends(pathlib.Path(model or directory), vocab_size, directory)
    if "eos_token" in ids:
        # First: training data end with it, whatever else may end a response.
        ends = [ids["eos_token"], *ends]
    stop_ids = tuple(dict.fromkeys(ends))
    if not stop_ids:
        raise UserError(
            f'{path} names no "eos_token", so a response could never end; add the token '
            'that ends a text of this model, such as "eos_token": "<|endoftext|>"'
        )
    template = _read_chat_template(directory, config, special_tokens)
    if chat_template:
        source = template.sources.get(str(chat_template)) if template is not None else None
        if source is None:
            source = read_text(pathlib.Path(chat_template), absent="name a template's file")
        template = ChatTemplate(source, origin=str(chat_template), special_tokens=special_tokens)
    return Tokenizer(
        backend=backend,
        vocab_size=vocab_size,
        eos_id=stop_ids[0],
        stop_ids=stop_ids,
        special_tokens=special_tokens,
        chat_template=template,
    )


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer in which every digit is a token of its own.

    So a number is read digit by digit, and 7 is the same token in 7, 17 and 71. All 256 bytes are in the
    vocabulary, so decoding restores any text. Ids 0 and 1 are `<pad>` and `<eos>`. The same texts give the
    same tokenizer.

    Args:
      texts: Prompts and solutions; a few thousand are enough.
      vocab_size: Largest vocabulary, at least 258. A task with few words gets a smaller one.

    Raises:
      UserError: `vocab_size` is too small.
    """
    special = [PAD_TOKEN, EOS_TOKEN]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + len(special):
        raise UserError(
            f"vocab_size {vocab_size} is too small: {len(alphabet)} bytes and {len(special)} "
            f"special tokens come first; use at least {len(alphabet) + len(special)}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        # Ids follow this order, and the library returns the alphabet in another one each time.
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(
        backend=backend,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        eos_id=1,
        stop_ids=(1,),
        special_tokens={"eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN},
    )


def _read_backend(path: pathlib.Path) -> tokenizers.Tokenizer:
    hint = fetch_hint(str(path.parent))
    absent = f"put the model's published tokenizer.json there, or name its directory{hint}"
    content = read_bytes(path, absent=absent)
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception and nothing narrower
        raise UserError(
            f"{path} is no readable tokenizer ({error}); copy the published file again, it may be "
            "cut short or a Git LFS pointer"
        ) from error
    if not backend.get_vocab_size(with_added_tokens=True):
        raise UserError(f"{path} has no tokens; copy the published file again")
    # Some published files contain truncation and padding settings; jaxrl limits lengths itself.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    return read_json_object(
        path,
        absent="put the file of that name that was published with the model there, or write one "
        'that names its tokens: {"eos_token": "..."}',
    )


def _ends(model: pathlib.Path, vocab_size: int, directory: pathlib.Path) -> list[int]:
    """The ids that end a response, from the first file that names any, as Transformers reads them."""
    for name in ("generation_config.json", "config.json"):
        path = model / name
        values = _read_json(path) if os.path.lexists(path) else {}
        ids = values.get("eos_token_id")
        if ids is None and isinstance(of_text := values.get("text_config"), dict):
            ids = of_text.get("eos_token_id")
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if odd := [i for i in ids if type(i) is not int]:
            raise UserError(
                f"{path} has eos_token_id {repr(odd[0])[:80]}; it must be a token id or a list of them: copy "
                "the published file again"
            )
        if unknown := [i for i in ids if not 0 <= i < vocab_size]:
            raise UserError(
                f"{path} has eos_token_id {', '.join(map(str, unknown))[:80]}, and the ids of "
                f"{directory / 'tokenizer.json'} go from 0 to {vocab_size - 1}, so no response would end "
                "there; name two files of one model"
            )
        if ids:
            return ids
    return []


def _read_chat_template(
    directory: pathlib.Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    path, given = directory / "chat_template.jinja", None
    files = {"default": path} if path.exists() else {}
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    files |= {file.stem: file for file in more}
    fault = ""
    try:
        if files:
            path, *_ = files.values()
            given = {name: read_text(file, absent="") for name, file in files.items()}
        elif (given := config.get("chat_template")) is not None:
            path = directory / "tokenizer_config.json"
        elif (path := directory / "chat_template.json").exists():
            given = read_json_object(path, absent="").get("chat_template")
        if given is None:
            return None
        if isinstance(given, list):
            given = {entry["name"]: entry["template"] for entry in given}
        named = {"default": given} if isinstance(given, str) else dict(given)
        if not all(isinstance(text, str) for pair in named.items() for text in pair):
            raise TypeError("a template is no text")
    except UserError as error:
        fault, named = str(error), {}
    except (TypeError, ValueError, KeyError) as error:
        fault, named = f"{path} has no chat template that can be read ({error!r})", {}
    # Raised where a chat is rendered: nothing else needs the template.
    return ChatTemplate(named, origin=str(path), special_tokens=special_tokens, fault=fault)


# Decoders write this replacement character for incomplete or invalid bytes.
_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character has at most four bytes. If it is still incomplete after so many tokens, it is invalid.
_MAX_OPEN = 8
# Decoding restarts a few tokens back, because the text of a token can depend on its neighbours.
_LONGEST_WINDOW, _KEPT = 12, 4


class TextStream:
    """Turns the tokens of one response into text, a few tokens at a time.

    The stream does not decide where a response ends (`stop_strings` does). It holds back text that is or may
    become a stop string, until more tokens arrive or the response ends.
    """

    def __init__(self, decode_text: Callable[[np.ndarray], str], stop: Sequence[str] = ()):
        """Args: a function from token ids to text; texts that end the response and are not shown."""
        self._decode_text = decode_text
        self._stop = tuple(stop)
        self._window: list[int] = []
        self._window_text = ""
        self._open = 0
        self._pending = ""

    def add(self, tokens: Iterable[int]) -> tuple[tuple[str, ...], str]:
        """Takes the next tokens.

        Returns:
          The text of each token ("" while a character is incomplete), and the text that can be shown now.
        """
        pieces = []
        for token in tokens:
            self._window.append(int(token))
            whole = self._text_of(self._window)
            self._open += 1
            if whole.endswith(_BROKEN) and self._open < _MAX_OPEN:
                pieces.append("")
                continue
            pieces.append(whole[len(self._window_text) :])
            self._open = 0
            if len(self._window) > _LONGEST_WINDOW:
                self._window = self._window[-_KEPT:]
                whole = self._text_of(self._window)
            self._window_text = whole
        self._pending += "".join(pieces)
        # Held back is the end of the pending text that is, or may become, a stop string.
        ends = (self._pending[at:] for at in range(len(self._pending) if self._stop else 0))
        is_held = lambda end: any(end.startswith(x) or x.startswith(end) for x in self._stop)  # noqa: E731
        shown = len(self._pending) - next((len(end) for end in ends if is_held(end)), 0)
        text, self._pending = self._pending[:shown], self._pending[shown:]
        return tuple(pieces), text

    def end(self, *, at_stop_string: bool = False) -> str:
        """The remaining text at the end of a response.

        Args:
          at_stop_string: whether the response ends with a stop string, which is not shown.
        """
        if at_stop_string:
            found = (self._pending.find(stop) for stop in self._stop)
            return self._pending[: min((at for at in found if at >= 0), default=None)]
        return self._pending + self._text_of(self._window)[len(self._window_text) :]

    def _text_of(self, tokens: Sequence[int]) -> str:
        return self._decode_text(np.array(tokens, np.int32))
