"""A tiny random policy with a real tokenizer, a file of prompts and a recipe: all that a run needs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer

RECIPE = """
batch_size: 4
num_iterations: 6
model: {{path: {folder}/model}}
data: {{path: {folder}/prompts.jsonl, max_prompt_tokens: 40}}
sampling: {{num_samples: 4, max_new_tokens: 12}}
reward: {{scorer: tests.trainer.scorers.CountLetters, num_workers: 1}}
algorithm: {{loss: drpo, loss_agg_mode: token-mean, drpo_epsilon: 0.2}}
optimizer: {{lr: 1.0e-2}}
checkpoint: {{every: 2, keep: 2}}
eval: {{every: 3, path: {folder}/heldout.jsonl, num_samples: 2}}
logging: {{samples_per_iteration: 2}}
"""

REPLAY = ("sampling.top_k=20", "sampling.top_p=0.05", "sampling.replay_support=true")
"""Narrowed sampling: of the random policy's nearly even distribution, this nucleus is less than 20 tokens."""


@pytest.fixture(scope="session")
def recipe_dir(tmp_path_factory) -> Path:
    """A --config-dir with the recipe `tiny`."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name, numbers in (("prompts", range(10)), ("heldout", range(10, 13))):
        records = ({"prompt": f"count {n}", "answer": str(n), "data_source": "letters"} for n in numbers)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder))
    return folder


@pytest.fixture(scope="session")
def command(recipe_dir):
    """The training command of the tiny recipe, as arguments for a process of its own."""

    def arguments(run_dir: Path, *overrides: str) -> list[str]:
        options = [f"--config-dir={recipe_dir}", "--config-name=tiny", f"run_dir={run_dir}", *overrides]
        return [sys.executable, "-m", "unirl.train_ar", *options]

    return arguments


@pytest.fixture(scope="session")
def train(command):
    """Runs the command to its end."""

    def run(run_dir: Path, *overrides: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            command(run_dir, *overrides), capture_output=True, text=True, timeout=300, env=ENVIRONMENT
        )

    return run


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}


def read_metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def wait_for_lines(run_dir: Path, count: int, process: subprocess.Popen, limit_s: float = 120) -> None:
    """Until metrics.jsonl has `count` lines beyond the first evaluation's."""
    path = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + limit_s
    while not path.exists() or len(path.read_text().splitlines()) < count + 1:
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="session")
def undisturbed(train, tmp_path_factory) -> Path:
    """The run directory of six iterations that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    finished = train(run_dir)
    assert finished.returncode == 0, finished.stderr
    return run_dir
