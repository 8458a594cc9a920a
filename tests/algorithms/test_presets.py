"""The shipped presets: what they are, that each trains, and what is said in them."""

from pathlib import Path

import pytest
import torch
import yaml

import unirl
from tests.algorithms.batches import random_batch
from unirl.algorithms import GAEConfig, NormConfig, RejectionConfig, make_algorithm, policy_loss
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
    "icepop": ("batch", "batch"),
    "kpop": ("batch", "batch"),
    "lite_ppo": ("group", "batch"),
    "raft_pp": (None, None),
    "ppo": ("batch", "batch"),
    "rloo": ("group", None),
    "sapo": ("batch", "batch"),
    "spo": ("group", None),
    "webrl_const_t10": ("group", "group"),
}
OF_STEPS = ("rollout.environment=calculator", "rollout.max_episode_tokens=100", "rollout.rows=step")


def algorithm_config(name: str, folder: Path):
    (folder / "bare.yaml").write_text(
        "# A recipe that says nothing of the algorithm\nbatch_size: 4\nnum_iterations: 1\nrun_dir: runs/bare\n"
        f"model: {{path: owner/model}}\ndata: {{path: {folder / 'bare.yaml'}}}\nsampling: {{max_new_tokens: 64}}\n"
    )
    overrides = OF_STEPS if name == "webrl_const_t10" else ()
    return compose("bare", [f"+algorithm={name}", *overrides], [folder, EXAMPLES]).algorithm


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
    config = algorithm_config(name, tmp_path)
    assert config.adv_norm == NormConfig(*NORMS[name], mean_leave1out=name == "rloo")
    # A critic has the place of the group.
    normalised_in_group_first = NORMS[name] == ("batch", "batch") and config.critic is None
    assert config.reward_norm == (NormConfig("group", "group") if normalised_in_group_first else None)


def test_filters(tmp_path):
    icepop, kpop, raft = (algorithm_config(name, tmp_path) for name in ("icepop", "kpop", "raft_pp"))
    assert icepop.use_decoupled_loss
    assert icepop.rejection_sampling == RejectionConfig("token", "ratio", "mask", lower=0.5, upper=5.0)
    assert kpop.use_decoupled_loss
    assert kpop.rejection_sampling == RejectionConfig("token", "binary_kl", "mask", upper=2.0)
    assert raft.success_filter
    assert raft.rejection_sampling is None


def test_webrl_is_ppo_on_steps(tmp_path):
    webrl = algorithm_config("webrl_const_t10", tmp_path)
    assert (webrl.loss, webrl.eps_clip, webrl.c_clip, webrl.step_adv_const_length) == ("ppo", 0.2, 3.0, 10)
    assert webrl.use_decoupled_loss
    assert webrl.rejection_sampling == RejectionConfig("token", "ratio", "mask", upper=5.0)
    assert (webrl.dynamic_filter, webrl.dynamic_bs) == ("nonzero_variance", False)


def test_ppo_has_a_critic_and_an_advantage_for_each_token(tmp_path):
    ppo = algorithm_config("ppo", tmp_path)
    assert (ppo.loss, ppo.eps_clip, ppo.critic.value_clip) == ("ppo", 0.2, 0.5)
    assert ppo.gae == GAEConfig(discount=1.0, gae_lambda=0.95)
    others = [algorithm_config(name, tmp_path) for name in PRESETS if name != "ppo"]
    assert {(other.gae, other.critic) for other in others} == {(None, None)}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_its_paper_and_what_differs(name):
    text = (EXAMPLES / "algorithm" / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert "arXiv" in text
    assert "# Differs: " in text
    assert set(yaml.safe_load(text)) >= {"loss", "loss_agg_mode", "adv_norm"}
