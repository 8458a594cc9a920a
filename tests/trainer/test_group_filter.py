import pytest

from tests.train.conftest import make_part
from unirl.errors import UserError
from unirl.trainer.group_filter import load_group_filter


def group(*rewards: float):
    return make_part([([1, 2], [[3]] * len(rewards))], rewards=list(rewards))


def test_the_built_in_filter():
    keep = load_group_filter("nonzero_variance")
    assert keep(group(0.0, 1.0))
    assert not keep(group(1.0, 1.0))
    assert not keep(group(float("nan"), 1.0, 1.0))


def test_no_filter():
    assert load_group_filter(None) is None


def test_a_filter_by_dotted_path_may_answer_with_a_tensor():
    keep = load_group_filter("tests.trainer.filters.mean_above_a_half")
    assert keep(group(0.0, 1.0, 1.0)) is True
    assert keep(group(0.0, 0.0, 1.0)) is False


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("tests.trainer.no_module.judge", "cannot import tests.trainer.no_module: No module named"),
        ("tests.trainer.filters.judge", "there is no judge in tests.trainer.filters"),
        ("tests.trainer.filters.NO_FILTER", "found a int; expected the dotted path of a callable"),
        ("judge", "expected the dotted path of a callable"),
    ],
)
def test_a_path_to_nothing_says_what_failed(path, message):
    with pytest.raises(UserError) as caught:
        load_group_filter(path)
    assert str(caught.value).startswith(f"algorithm.dynamic_filter={path}: ")
    assert message in str(caught.value)


def test_an_answer_that_is_no_bool_is_refused():
    keep = load_group_filter("tests.trainer.filters.forgets_to_answer")
    with pytest.raises(UserError, match="found the answer None on a group, expected True"):
        keep(group(0.0, 1.0))
