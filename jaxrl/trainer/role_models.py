"""The model of every role of a run, before any role is built.

actor, reference        config.weights, or config.model
others                  weights of their own (`role_table.ROLES`), else the actor's trunk
judge                   reward.judge.model, with a tokenizer of its own
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl.config.schema import Config
from jaxrl.data.tokenizer import Tokenizer, load_tokenizer
from jaxrl.errors import UserError
from jaxrl.models import lora
from jaxrl.models.heads import score_config
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_loading import check_params
from jaxrl.models.model_config import ModelConfig
from jaxrl.trainer.model_shape import is_here, model_of
from jaxrl.trainer.role_table import ROLES


class _NoTokenizer:
    """Stands in for a tokenizer where only shapes are built, none of which depends on the tokens."""

    stop_ids = (0,)

    def decode(self, ids: np.ndarray) -> str:
        """Never called: shapes are not text."""
        raise AssertionError(f"{len(ids)} tokens of a role that was built for its shapes alone")


SHAPES_ONLY: Any = _NoTokenizer()


@dataclasses.dataclass(frozen=True)
class RoleModels:
    """The model of each role, and the tokenizers of those that sample.

    Attributes:
      by_role: model of each role; "rollout" samples with the actor's and has none.
      origin: where the actor's shape is from, for people.
      assumed: (role, why) of shapes that are not known and are taken to be the actor's.
      tokenizer, judge_tokenizer: of the policy and of the judge; `SHAPES_ONLY` in a plan.
    """

    by_role: Mapping[str, ModelConfig]
    origin: str
    assumed: tuple[tuple[str, str], ...] = ()
    tokenizer: Tokenizer = SHAPES_ONLY
    judge_tokenizer: Tokenizer = SHAPES_ONLY

    @property
    def actor(self) -> ModelConfig:
        """The policy's model."""
        return self.by_role["actor"]

    def with_tokenizers(self, policy: Tokenizer, judge: Tokenizer | None) -> RoleModels:
        """The same models with the number of ids that their tokenizers have.

        Args:
          policy: the policy's tokenizer.
          judge: the generative judge's; None without a judge.
        """
        own = {} if judge is None else {"judge": judge.vocab_size}
        # A model that is too small for the policy's tokens is refused by `check_vocabulary`.
        sized = {
            role: dataclasses.replace(
                model, num_tokens=min(model.vocab_size, own.get(role, policy.vocab_size))
            )
            for role, model in self.by_role.items()
        }
        return dataclasses.replace(
            self, by_role=sized, tokenizer=policy, judge_tokenizer=judge or SHAPES_ONLY
        )


def role_models(config: Config, roles: Sequence[str]) -> RoleModels:
    """The models of roles by their shapes; a checkpoint that is not here counts as large as the actor.

    Raises:
      UserError: the settings contradict a checkpoint, or the policy has neither a checkpoint nor a shape.
    """
    actor, origin = model_of(config)
    found, assumed = {}, []
    for role in roles:
        if role == "rollout":
            continue
        directory, model = weights_of(role, config), lora.base_config(actor)
        row = ROLES.get(role)
        if role == "actor" or (row is not None and row.adapters):
            model = actor
        elif directory and is_here(directory):
            model = read_config(directory)
        elif directory:
            assumed.append(
                (
                    role,
                    f"counted as large as the actor: {directory} is not here, so its shape is not known",
                )
            )
        scores = row is not None and row.scores and not model.num_scores
        found[role] = score_config(model) if scores else model
    return RoleModels(found, origin, tuple(assumed))


def weights_of(role: str, config: Config) -> str:
    """The directory of a role's own weights; "" of a role that starts from the policy's."""
    if role == "judge":
        return config.reward.judge.model
    return ROLES[role].weights(config) if role in ROLES else ""


def load_judge_tokenizer(config: Config) -> Tokenizer:
    """Looks through the files of the generative judge, and loads its tokenizer.

    Raises:
      UserError: a file is missing or broken, the model says nothing in words, its tokenizer is another
        model's, or it has no chat template though it is to be asked through one.
    """
    options = config.reward.judge
    model = read_config(options.model)
    if model.num_scores:
        raise UserError(
            f"reward.judge.model {options.model} is a model of scores, which says nothing in words; set "
            "reward.model to it, or name a language model"
        )
    check_params(options.model, model)
    tokenizer = load_tokenizer(options.model)
    if tokenizer.vocab_size > model.vocab_size:
        raise UserError(
            f"the tokenizer of {options.model} has {tokenizer.vocab_size} tokens, the model's embedding "
            f"{model.vocab_size} rows; put two files of one model there"
        )
    if options.chat and tokenizer.chat_template is None:
        raise UserError(
            f"{options.model} has no chat template; set reward.judge.chat to False, or put a "
            "chat_template.jinja there"
        )
    return tokenizer


def check_vocabulary(model: ModelConfig, tokenizer: Tokenizer, directory: str) -> None:
    """Raises UserError unless a model can read the policy's tokens."""
    if model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model in {directory} "
            f"{model.vocab_size}; it reads the policy's tokens as they are, so use one with the same "
            "tokenizer"
        )


def check_same_tokens(policy: Tokenizer, setting: str, directory: str) -> None:
    """Raises UserError where the tokenizer of a directory has other ids for the policy's tokens.

    Further tokens do no harm, and a directory without a tokenizer is not looked at.
    """
    if not (pathlib.Path(directory) / "tokenizer.json").exists():
        return
    theirs = load_tokenizer(directory).backend.get_vocab(with_added_tokens=True)
    ours = policy.backend.get_vocab(with_added_tokens=True)
    differing = sorted(token for token, number in ours.items() if theirs.get(token) != number)
    if differing:
        token = differing[0]
        raise UserError(
            f"{setting} {directory} has another tokenizer: {len(differing):,} of the policy's {len(ours):,} "
            f"tokens have another id there, such as {token!r}, {ours[token]} here and "
            f"{theirs.get(token, 'none')} there; name a model with the same tokenizer"
        )
