"""Recipes for one accelerator, three steps end to end: small random checkpoints, real tokenizer and data."""

import dataclasses
import json
import pathlib
import shutil

import jax
import pytest
from extras import import_extra

from jaxrl.config import command_line
from jaxrl.config.config_tree import from_config_dict
from jaxrl.config.schema import Config
from jaxrl.data.row_layouts import DAPO_AFTER, DAPO_BEFORE
from jaxrl.errors import UserError
from jaxrl.models.model_config import ModelConfig
from jaxrl.rewards.user import Responses
from jaxrl.tracking.metrics import read_metrics
from jaxrl.trainer import program

ROOT = pathlib.Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not DATA.is_dir(), reason="the developers' data is not here"),
]
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
# What a laptop can do of a step, and nothing of the algorithm.
CHEAP = {
    "rollout.num_prompts": 2,
    "rollout.num_samples": 2,
    "rollout.generation_prompts": 2,
    "rollout.max_generation_batches": 1,
    "rollout.on_shortage": "fill",
    "rollout.max_response_tokens": 16,
    "rollout.slots": 8,
    "rollout.prefill_prompts": 4,
    "rollout.tokens_per_dispatch": 8,
    "reward.overlong_buffer_tokens": 0,
    "algorithm.updates_per_step": 2,
    "train.rows": 1,
    "train.row_tokens": 384,
    "train.logprob_chunk_tokens": 64,
    "data.max_prompt_tokens": 368,
    "data.evaluation.size": 2,
    "evaluation.num_samples": 1,
    # A CPU has no products of bfloat16.
    "rollout.dtype": "float32",
    "train.dtype": "float32",
    "train.remat": "none",
    "run.num_steps": 3,
    "run.save_every": 3,
    "mesh.train": "1-1-1",
    "mesh.generate": "",
    "mesh.fsdp": 1,
}


def share_of_spaces(responses: Responses) -> list[float]:
    """A reward in which random answers differ, so that there is something to learn: none is ever right."""
    return [text.count(" ") / max(1, len(text)) for text in responses.texts]


def write_parquet(rows: list[dict], path: pathlib.Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def lines_of(name: str, limit: int) -> list[dict]:
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()[:limit]]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Checkpoints of both architectures with Qwen's tokenizer, and files as their publishers lay them out."""
    folder = tmp_path_factory.mktemp("real")
    transformers = import_extra("parity", "transformers")
    torch = import_extra("parity", "torch")
    torch.manual_seed(0)
    made = {
        "qwen": transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(vocab_size=151_936, tie_word_embeddings=True, **SMALL)
        ),
        "llama": transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=151_936, **SMALL)
        ),
    }
    for name, model in made.items():
        model.save_pretrained(folder / name)
        for file in (DATA / "tokenizers" / "qwen2.5").iterdir():
            shutil.copy(file, folder / name)
    for split in ("train", "test"):
        write_parquet(lines_of(f"gsm8k_{split}.jsonl", 200), folder / f"gsm8k_{split}.parquet")
    for name, published in (("dapo_math_17k", "dapo"), ("aime_2024", "aime")):
        rows = [
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": DAPO_BEFORE + row["problem"] + DAPO_AFTER}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str(row["answer"]), "style": "rule"},
                "extra_info": {"index": str(n)},
            }
            for n, row in enumerate(lines_of(f"{name}.jsonl", 30))
        ]
        # The published file repeats every problem.
        write_parquet(rows * 3, folder / f"{published}.parquet")
    return folder


RECIPES = {
    "grpo_qwen05b_gsm8k": ("qwen", "gsm8k_train", "gsm8k_test"),
    "dapo_qwen15b_math": ("qwen", "dapo", "aime"),
    "grpo_qwen7b_lora": ("qwen", "gsm8k_train", "gsm8k_test"),
    "ppo_llama8b": ("llama", "gsm8k_train", "gsm8k_test"),
}


@pytest.mark.parametrize("name", RECIPES)
def test_three_steps(name, files, tmp_path):
    model, train, evaluation = RECIPES[name]
    tree = command_line.load_recipe(ROOT / "configs" / f"{name}.py")
    changes = CHEAP | {
        "weights": str(files / model),
        "tokenizer.path": "",
        "data.train.path": str(files / f"{train}.parquet"),
        "data.evaluation.path": str(files / f"{evaluation}.parquet"),
        "run.output": str(tmp_path),
        "reward.functions": {"spaces": {"path": f"{__file__}:share_of_spaces", "weight": 1.0}},
    }
    if name == "ppo_llama8b":
        changes |= {"rollout.num_samples": 1, "rollout.num_prompts": 4}
    with tree.unlocked():
        tree.update_from_flattened_dict(changes)
    devices = jax.devices()[:1]
    # The recipe states the shape of the big one, which this checkpoint has not.
    stated = from_config_dict(Config, tree)
    with pytest.raises(UserError, match="does not describe the model"):
        program.train(stated, devices=devices)
    config = dataclasses.replace(stated, model=ModelConfig(lora=stated.model.lora))
    assert program.train(config, devices=devices) == 0
    rows = read_metrics(config.run_folder.rl.metrics)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["actor/grad_norm"] > 0 for row in rows[1:])
    assert config.run_folder.report.exists()
