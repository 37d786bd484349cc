"""Finds and loads a model to evaluate: a Hugging Face directory, or the newest checkpoint of a run."""

from __future__ import annotations

import ast
import dataclasses
import os
import pathlib
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl.data import model_directory
from jaxrl.data.data_config import SourceConfig
from jaxrl.data.tokenizer import Tokenizer
from jaxrl.files import open_file, read_bytes, read_text
from jaxrl.mesh.rules import with_shardings
from jaxrl.models import lora
from jaxrl.models.decoder import Params, decoder_graph
from jaxrl.models.huggingface.weight_loading import check_params, load_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.tracking.run_folder import RunFolder
from jaxrl.tracking.run_weights import (
    files_of_run,
    model_of_run,
    newest_weights,
    read_newest_params,
)

# Size of the samples from the beginning, middle and end of a file of weights that identify it.
_SAMPLED_BYTES = 2**16


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """A model whose files are checked; its weights are not loaded.

    Attributes:
      path: path that the user gave.
      model: config of the model, with adapters merged.
      tokenizer: tokenizer of the model.
      context_tokens: number of positions of the model.
      weights: text that identifies the weights.
      run: whether `path` is the folder of a run.
    """

    path: pathlib.Path
    model: ModelConfig
    tokenizer: Tokenizer
    context_tokens: int
    weights: str
    run: bool

    @property
    def name(self) -> str:
        """The display name: the directory's name, for a run with the name of its recipe."""
        # Not resolved: a model of the hub is a link, and what it links to is named after a commit.
        parts = pathlib.Path(os.path.abspath(self.path)).parts
        return "-".join(parts[-2:]) if self.run else parts[-1]

    def load(self, mesh: Mesh, dtype: Any) -> Params:
        """Loads the weights in the generation layout, with adapters merged.

        Args:
          mesh: mesh of the weights.
          dtype: data type of the weights.

        Raises:
          UserError: if a file is damaged, or a run's checkpoint does not fit its model.
        """
        where = model_directory.generation_shardings(self.model, mesh)
        if not self.run:
            return load_params(self.path, self.model, where, dtype=dtype)
        trained = model_of_run(files_of_run(self.path))
        shapes = decoder_graph(trained)[1]
        like = with_shardings(shapes, model_directory.generation_shardings(trained, mesh))
        _, params = read_newest_params(self.path, like)

        def merged(params: Params) -> Params:
            return jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), lora.merge(params, trained))

        return jax.jit(merged, out_shardings=where)(params)

    def trained_with(self, setting: str) -> Any:
        """The value of a setting in the run's config; None if unknown, or if the model is not a run."""
        path = RunFolder(self.path).config
        if not self.run or not path.is_file():
            return None
        # A dict has a line per entry: reward.grader_options.pattern = '-?\\d+'.
        entries: dict[str, Any] = {}
        for line in read_text(path, absent="").splitlines():
            name, _, text = line.partition(" = ")
            if name != setting and not name.startswith(f"{setting}."):
                continue
            try:
                value = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                return None
            if name == setting:
                return value
            inner = entries
            *path_inside, last = name.removeprefix(f"{setting}.").split(".")
            for key in path_inside:
                inner = inner.setdefault(key, {})
            inner[last] = value
        return entries or None

    def evaluation_sources(self) -> list[SourceConfig]:
        """The evaluation problems of the run that `path` is the folder of; empty for other models."""
        further = self.trained_with("data.evaluations") or {}
        first = self.trained_with("data.evaluation") or {}
        known = {field.name for field in dataclasses.fields(SourceConfig)}
        sources = [
            SourceConfig(**{name: value for name, value in settings.items() if name in known})
            for settings in (first, *further.values())
        ]
        return [source for source in sources if source.is_named]


def find_model(path: pathlib.Path) -> FoundModel:
    """Finds the model of a directory and checks its files.

    Raises:
      UserError: if a file is missing or damaged, or the directory contains no language model.
    """
    model_directory.check_is_directory(path, or_else=", or the folder of a run")
    run = model_directory.is_run_folder(path)
    directory = files_of_run(path) if run else path
    found = model_directory.read_model(directory)
    if run:
        newest = newest_weights(path)
        manifest = zlib.crc32(newest.checkpoints.manifest(newest.step).read_bytes())
        stage = newest.checkpoints.path.parent.name
        weights = f"{stage} step {newest.step}, {manifest:08x}"
    else:
        check_params(path, found.model)
        weights = _fingerprint(path)
    return FoundModel(path, found.model, found.tokenizer, found.context_tokens, weights, run)


def _fingerprint(directory: pathlib.Path) -> str:
    """A checksum that identifies weights by samples of their files, without reading all of them."""
    crc = zlib.crc32(read_bytes(directory / "config.json", absent="put the model's there"))
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        crc = zlib.crc32(f"{path.name} {size}".encode(), crc)
        with open_file(path, absent="put the model's there") as file:
            for start in (0, size // 2, max(size - _SAMPLED_BYTES, 0)):
                file.seek(start)
                crc = zlib.crc32(file.read(_SAMPLED_BYTES), crc)
    return f"{crc:08x}"
