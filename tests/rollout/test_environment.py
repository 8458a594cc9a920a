"""Environments by name, and the calculator."""

import pytest

from unirl.config.schema import ENVIRONMENTS
from unirl.errors import UserError
from unirl.rollout.environment import BUILT_IN, load_environment
from unirl.rollout.environments.calculator import USAGE, Calculator


def test_the_schema_names_the_built_in_ones():
    assert tuple(BUILT_IN) == ENVIRONMENTS


def test_each_episode_has_an_environment_of_its_own():
    make = load_environment("tests.rollout.environments.Counter", {"turns": 2})
    assert make() is not make()
    assert make().turns == 2


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("calculate", {}, "expected one of calculator or the dotted path"),
        ("no.such.Module", {}, "cannot import no.such"),
        (
            "tests.rollout.environments.Missing",
            {},
            "expected a class Missing in .*, found NoneType",
        ),
        ("types.SimpleNamespace", {}, "has no method reset and no step"),
        ("calculator", {"cost": 1}, "rollout.environment_args={'cost': 1}: .*unexpected keyword argument 'cost'"),
    ],
)
def test_what_cannot_be_an_environment_is_refused(name, args, message):
    with pytest.raises(UserError, match=message):
        load_environment(name, args)


@pytest.mark.parametrize(
    ("response", "reward", "done", "said"),
    [
        ("calc(34+57)", 0, False, "91"),
        ("first calc(1+1), then calc(-5-12)", 0, False, "-17"),
        ("calc(12*12)", 0, False, "144"),
        (f"calc({'9' * 18}*{'9' * 18})", 0, False, str((10**18 - 1) ** 2)),
        (f"calc({'9' * 19}+1)", 0, False, USAGE),
        ("calc(1/0)", 0, False, USAGE),
        ("", 0, False, USAGE),
        ("\\boxed{7}", 1, True, None),
        ("calc(3+4) \\boxed{9} \\boxed{7}", 1, True, None),
        ("\\boxed{8}", 0, True, None),
        ("\\boxed{7} \\boxed{8}", 0, True, None),
    ],
)
def test_the_calculator(response, reward, done, said):
    calculator = Calculator()
    assert calculator.reset({"answer": "7"}, seed=0) == []
    result = calculator.step(response)
    assert (result.reward, result.done) == (reward, done)
    assert [message["content"] for message in result.observation] == ([] if said is None else [said])


def test_calls_may_cost():
    calculator = Calculator(call_cost=0.25)
    calculator.reset({"answer": "7"}, seed=0)
    assert [calculator.step(text).reward for text in ("calc(3+4)", "what?", "\\boxed{7}")] == [-0.25, -0.25, 1]
