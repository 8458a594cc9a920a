"""Types and rules of single keys, unknown keys, missing values: each with what was found and what to do."""

import pytest

from unirl.config.schema import TrainConfig
from unirl.errors import ConfigError


def problems_of(small, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        small(*overrides)
    return caught.value.problems


def test_values_are_typed_dataclasses(small):
    config = small("num_iterations=1e2", "optimizer.lr=1", "run_dir=7", "num_threads=null")
    assert isinstance(config, TrainConfig)
    assert config.num_iterations == 100
    assert isinstance(config.num_iterations, int)
    assert isinstance(config.optimizer.lr, float)
    assert config.run_dir == "7"
    assert config.num_threads is None
    assert config.data.path.endswith("prompts.jsonl")
    assert config.optimizer.betas == [0.9, 0.999]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("optimizer.lr=abc", "optimizer.lr: found 'abc', expected a float"),
        ("optimizer.lr=true", "optimizer.lr: found true, expected a float"),
        ("optimizer.lr=inf", "optimizer.lr: found inf, expected a float"),
        ("batch_size=1.5", "batch_size: found 1.5, expected an integer"),
        ("batch_size=true", "batch_size: found true, expected an integer"),
        ("seed=1e20", "seed: found 100000000000000000000, expected a value >= 0 and < 9.22337e+18"),
        ("batch_size=null", "batch_size: found null, expected an integer"),
        ("data.shuffle=1", "data.shuffle: found 1, expected true or false"),
        ("num_threads=many", "num_threads: found 'many', expected an integer or null"),
        ("optimizer.betas=0.9", "optimizer.betas: found 0.9, expected a list of float"),
        ("optimizer.betas=[0.9,1]", "optimizer.betas: found 1, expected a value >= 0 and < 1"),
        ("batch_size=0", "batch_size: found 0, expected a value >= 1"),
        ("sampling.top_p=1.5", "sampling.top_p: found 1.5, expected a value > 0 and <= 1"),
        ("eval=5", "eval: found 5, expected a section"),
        (
            "optimizer.schedule=constnt",
            "optimizer.schedule: found 'constnt', expected one of constant, linear, cosine; the nearest is constant",
        ),
        (
            "algorithm.reward_norm.mean_level=grop",
            "algorithm.reward_norm.mean_level: found 'grop', expected one of batch, group; the nearest is group",
        ),
        (
            "sampling.max_new_tokens=???",
            "sampling.max_new_tokens: is not set and has no default: give sampling.max_new_tokens=... or set it in the "
            "recipe",
        ),
        (
            "model.path='${oc.env:UNIRL_TEST_UNSET}'",
            "model.path: environment variable UNIRL_TEST_UNSET is not set: export UNIRL_TEST_UNSET=..., or give the "
            "key on the command line",
        ),
        ("model.path='${no.such.key}'", "model.path: cannot be resolved: Interpolation key 'no.such.key' not found"),
    ],
)
def test_one_wrong_value_is_one_problem(small, override, problem):
    assert problems_of(small, override) == [problem]


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("algorithm.drpo_epsilom=1", "algorithm.drpo_epsilon"),
        ("+algorithm.drpo_epsilom=1", "algorithm.drpo_epsilon"),
        ("algorithm.adv_norm.mean_levl=group", "algorithm.adv_norm.mean_level"),
        ("algorithm.reward_norm.std_levl=group", "algorithm.reward_norm.std_level"),
        ("algoritm.loss=drpo", "algorithm.loss"),
        ("lr=1", "optimizer.lr or algorithm.critic.optimizer.lr"),
        ("batchsize=4", "batch_size"),
        ("temperature=1", "sampling.temperature or algorithm.temperature or eval.temperature"),
    ],
)
def test_an_unknown_key_names_the_nearest(small, override, nearest):
    problem = problems_of(small, override)[0]
    assert problem.endswith(f"unknown key; the nearest is {nearest}")


def test_unknown_keys_of_a_recipe_file_are_named_line_by_line(folder, small):
    with open(folder / "small.yaml", "a") as file:
        file.write("optimiser: {lr: 1e-4, weight_decay: 0}\nbogus:\n")
    assert problems_of(small) == [
        "optimiser.lr: unknown key; the nearest is optimizer.lr",
        "optimiser.weight_decay: unknown key; the nearest is optimizer.weight_decay",
        "bogus: unknown key; the nearest is batch_size",
    ]


def test_environment_variables_become_numbers(small, monkeypatch):
    monkeypatch.setenv("UNIRL_TEST_VALUE", "1e-4")
    monkeypatch.setenv("UNIRL_TEST_SWITCH", "false")
    config = small("optimizer.lr='${oc.env:UNIRL_TEST_VALUE}'", "data.shuffle='${oc.env:UNIRL_TEST_SWITCH}'")
    assert config.optimizer.lr == 1e-4
    assert config.data.shuffle is False
    assert problems_of(small, "batch_size='${oc.env:UNIRL_TEST_VALUE}'") == [
        "batch_size: found '1e-4', expected an integer"
    ]


def test_free_mappings_take_any_key(small):
    config = small("data.kind=reasoning_gym", "data.path=null", "+data.tasks.chain_sum.min_terms=2")
    assert config.data.tasks == {"chain_sum": {"min_terms": 2}}


def test_all_problems_at_once_and_no_consequences(small):
    problems = problems_of(
        small, "sampling.max_new_tokens=0", "+bogus=1", "algorithm.horizon=${sampling.max_new_tokens}", "num_devices=3"
    )
    assert [problem.partition(":")[0] for problem in problems] == [
        "+bogus=1",
        "sampling.max_new_tokens",
        "algorithm.horizon",
        "eval.max_new_tokens",
        "batch_size",
    ]


def test_one_unset_variable_is_one_problem(small):
    problems = problems_of(small, "data.path='${oc.env:UNIRL_TEST_UNSET}'", "eval.path='${data.path}'")
    assert len(problems) == 1
    assert "UNIRL_TEST_UNSET" in problems[0]
