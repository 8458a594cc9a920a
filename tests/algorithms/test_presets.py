"""The shipped presets: what they are, that each trains, and what is said in them."""

from pathlib import Path

import pytest
import torch
import yaml

import unirl
from tests.algorithms.batches import random_batch
from unirl.algorithms import NormConfig, make_algorithm, policy_loss
from unirl.config import compose

EXAMPLES = Path(unirl.__file__).parent.parent / "examples"
PRESETS = sorted(path.stem for path in (EXAMPLES / "algorithm").glob("*.yaml"))
NORMS = {
    "cispo": ("batch", "batch"),
    "dapo": ("batch", "batch"),
    "dapo_dynamic_bs": ("batch", "batch"),
    "dppo": ("group", None),
    "dr_grpo": ("group", None),
    "drpo": ("group", None),
    "grpo": ("batch", "batch"),
    "gspo": ("batch", "batch"),
    "lite_ppo": ("group", "batch"),
    "rloo": ("group", None),
    "sapo": ("batch", "batch"),
    "spo": ("group", None),
}


def algorithm_config(name: str, folder: Path):
    (folder / "bare.yaml").write_text(
        "# A recipe that says nothing of the algorithm\nbatch_size: 4\nnum_iterations: 1\nrun_dir: runs/bare\n"
        f"model: {{path: owner/model}}\ndata: {{path: {folder / 'bare.yaml'}}}\nsampling: {{max_new_tokens: 64}}\n"
    )
    return compose("bare", [f"+algorithm={name}"], [folder, EXAMPLES]).algorithm


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_runs_as_it_is(name, tmp_path):
    config = algorithm_config(name, tmp_path)
    make_algorithm(config)
    batch = random_batch((4, 5), seed=1)
    batch.logp[:] = batch.old_logp
    inputs = batch.inputs()
    loss = policy_loss(config, **inputs).loss
    (gradient,) = torch.autograd.grad(loss, inputs["logp"])
    assert gradient.any()


@pytest.mark.parametrize("name", PRESETS)
def test_the_matrix_of_norms(name, tmp_path):
    norm = algorithm_config(name, tmp_path).adv_norm
    assert (norm.mean_level, norm.std_level) == NORMS[name]
    assert norm == NormConfig(*NORMS[name], mean_leave1out=name == "rloo")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_its_paper_and_what_differs(name):
    text = (EXAMPLES / "algorithm" / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert "arXiv" in text
    assert "# Differs: " in text
    assert set(yaml.safe_load(text)) >= {"loss", "loss_agg_mode", "adv_norm"}
