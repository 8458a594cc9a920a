import threading

import pytest

from unirl.reward.local.math_verify import MathVerifyRewardScorer


def score(response: str, answer: str) -> float:
    (reward,) = MathVerifyRewardScorer().score([response], [answer])
    return reward


@pytest.mark.parametrize(
    ("answer", "response", "verdict"),
    [
        ("42", r"\boxed{42}", 1.0),
        ("42", "the answer is 42", 0.0),
        ("42", r"\boxed{}", 0.0),
        ("42", r"\boxed{42} then \boxed{7}", 0.0),
        ("7", r"\boxed{42} then \boxed{7}", 1.0),
        ("42", r"\boxed 42", 1.0),
        ("$42$", r"\boxed{42}", 1.0),
        (r"\boxed{42}", r"\boxed{42}", 1.0),
        (r"\frac{1}{2}", r"\boxed{0.5}", 1.0),
        (r"\frac{1}{3}", r"\boxed{0.333}", 0.0),
        (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", 1.0),
        (r"\{1,2,3\}", r"\boxed{\{3,2,1\}}", 1.0),
        ("12", r"\boxed{12\text{ cm}}", 1.0),
        ("42", r"\boxed{x=42}", 1.0),
        ("42", r"\boxed{\frac{}{", 0.0),
        ("42", r"\boxed{9^{9^{9^{9}}}}", 0.0),
        ("42", r"\boxed{9^9^9^9}", 0.0),
        ("42", r"\boxed{100000!}", 0.0),
        ("42", r"\boxed{(9!)!}", 0.0),
        ("42", r"\boxed{2^{99999999}}", 0.0),
        ("42", r"\boxed{" + "{" * 100 + "42" + "}" * 100 + "}", 0.0),
        ("42", r"\boxed{" + "(" * 100 + "42" + ")" * 100 + "}", 0.0),
        ("42", r"\boxed{" + "1" * 100_000 + "}", 0.0),
        ("120", r"\boxed{5!}", 1.0),
    ],
)
def test_verdicts(answer, response, verdict):
    assert score(response, answer) == verdict


def test_grades_off_the_main_thread():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(score(r"\boxed{\frac{1}{3}}", r"\frac{1}{3}")))
    thread.start()
    thread.join()
    assert verdicts == [1.0]


def test_an_answer_that_cannot_be_read_is_reported():
    with pytest.raises(ValueError, match="cannot read the prompt's answer"):
        score(r"\boxed{1}", "")
