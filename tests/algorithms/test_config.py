"""Rules of the loss config, and that reading them needs no torch."""

import subprocess
import sys
from dataclasses import dataclass

import pytest

from unirl import algorithms
from unirl.algorithms import PolicyLossConfig, loss_config_problems, required_inputs
from unirl.algorithms.validation import as_config
from unirl.utils.keys import key

DECOUPLED = {"loss": "ppo", "use_decoupled_loss": True}


def problems(keys: dict) -> list[str]:
    return loss_config_problems(as_config(PolicyLossConfig, keys))


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"loss_agg_mode": "seq-mean-token-sum-norm", "horizon": 8192},
        {"loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 4.0},
        {"loss": "ppo", "importance_sampling_level": "sequence", "c_clip": 3},
        {"loss": "sapo", "old_logp_source": "recompute"},
        {**DECOUPLED, "rejection_sampling": {"upper": 5.0}},
        {**DECOUPLED, "rejection_sampling": {"upper": 5.0, "lower": 0.5, "action": "clamp"}},
        {**DECOUPLED, "rejection_sampling": {"metric": "kl_k1", "upper": 0.1, "lower": -0.1, "level": "sequence"}},
    ],
)
def test_sound_configs(keys):
    assert problems(keys) == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "dpro"}, "did you mean 'drpo'"),
        ({"loss_agg_mode": "token_mean"}, "did you mean 'token-mean'"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "horizon: found null"),
        ({"horizon": 0}, "horizon: found 0"),
        ({"eps_clip": "0.2"}, "eps_clip: found '0.2', expected a number"),
        ({"eps_clip": float("nan")}, "eps_clip: found nan, expected a finite number"),
        ({"eps_clip": None}, "eps_clip: found None, expected a number"),
        ({"use_decoupled_loss": "yes"}, "expected true or false"),
        ({"c_clip": 1.0}, "c_clip: found 1.0, expected a number > 1"),
        ({"drpo_epsilon": 0}, "drpo_epsilon: found 0"),
        ({"sapo_tau_pos": 0.0}, "sapo_tau_pos: found 0.0"),
        ({"sapo_tau_neg": -1}, "sapo_tau_neg: found -1"),
        ({"entropy_coef": -0.1}, "entropy_coef: found -0.1"),
        ({"kl_estimator": "k4"}, "kl_estimator: found 'k4'"),
        ({"loss": "cispo"}, "loss cispo needs it"),
        ({"loss": "cispo", "eps_clip_higher": 0.0}, "loss cispo needs it"),
        ({"loss": "cispo", "eps_clip_higher": 0.2, "importance_sampling_level": "sequence"}, "set it to token"),
        ({"loss": "sapo", "use_decoupled_loss": True}, "use_decoupled_loss: loss sapo"),
        ({"old_logp_source": "recomputed"}, "did you mean 'recompute'"),
        ({**DECOUPLED, "old_logp_source": "recompute"}, "old_logp_source: use_decoupled_loss compares"),
        ({"rejection_sampling": {"upper": 5.0}}, "only the decoupled loss has both"),
        ({**DECOUPLED, "rejection_sampling": {}}, "rejection_sampling.upper: found null"),
        ({**DECOUPLED, "rejection_sampling": {"upper": "5"}}, "rejection_sampling.upper: found '5'"),
        ({**DECOUPLED, "rejection_sampling": {"upper": 1.0}}, "expected > 1 for metric ratio"),
        ({**DECOUPLED, "rejection_sampling": {"upper": 2.0, "lower": 0.0}}, "expected > 0 for metric ratio"),
        ({**DECOUPLED, "rejection_sampling": {"upper": 2.0, "lower": 2.0}}, "expected less than upper"),
        ({**DECOUPLED, "rejection_sampling": {"metric": "kl_k2", "upper": 0.0}}, "equal policies have KL 0"),
        (
            {**DECOUPLED, "rejection_sampling": {"metric": "kl_k2", "upper": 0.1, "action": "clamp"}},
            "it needs metric ratio",
        ),
        ({**DECOUPLED, "rejection_sampling": {"upper": 2.0, "agg": "median"}}, "rejection_sampling.agg"),
    ],
)
def test_what_breaks_a_rule_is_named(keys, message):
    found = problems(keys)
    assert len(found) == 1
    assert message in found[0]


def test_unknown_keys_are_refused_by_their_nearest_name():
    with pytest.raises(ValueError, match="unknown key 'eps_clp'; did you mean 'eps_clip'"):
        problems({"eps_clp": 0.1})
    with pytest.raises(ValueError, match="RejectionConfig: unknown key 'uper'; did you mean 'upper'"):
        problems({"rejection_sampling": {"uper": 2}})
    with pytest.raises(TypeError, match="expected a PolicyLossConfig or a dict"):
        as_config(PolicyLossConfig, 3)


def test_further_keys_of_a_trainer_are_not_judged():
    @dataclass
    class Trainer(PolicyLossConfig):
        temperature: float = key(1.0, "", gt=0)

    assert loss_config_problems(Trainer(temperature=-1)) == []


def test_required_inputs():
    assert required_inputs(PolicyLossConfig()) == ()
    config = PolicyLossConfig(loss="ppo", use_decoupled_loss=True, kl_coef=0.1, entropy_coef=0.1)
    assert required_inputs(config) == ("prox_logp", "ref_logp", "entropy")
    assert required_inputs(PolicyLossConfig(old_logp_source="recompute")) == ("prox_logp",)


def test_the_config_loads_without_torch():
    code = (
        "import sys; from unirl.algorithms import NormConfig, PolicyLossConfig, loss_config_problems;"
        "assert loss_config_problems(PolicyLossConfig()) == []; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in algorithms.__all__:
        assert hasattr(algorithms, name), name
    with pytest.raises(AttributeError, match="no attribute 'policy_los'"):
        algorithms.policy_los  # noqa: B018
