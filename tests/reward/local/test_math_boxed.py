import random
import re
import threading
import time

import pytest

from tests.reward.local.pairs import DIFFERENT, EQUAL
from unirl.reward.local.math_boxed import MathBoxedRewardScorer


def score(response: str, answer: str) -> float:
    (reward,) = MathBoxedRewardScorer().score([response], [answer])
    return reward


@pytest.mark.parametrize(("answer", "box"), EQUAL)
def test_equal(answer, box):
    assert score(rf"So we get \boxed{{{box}}}.", answer) == 1.0
    assert score(rf"\boxed{{{box}}}", rf"\boxed{{{answer}}}") == 1.0


@pytest.mark.parametrize(("answer", "box"), DIFFERENT)
def test_different(answer, box):
    assert score(rf"So we get \boxed{{{box}}}.", answer) == 0.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"first \boxed{3} then \boxed{42}", 1.0),
        (r"first \boxed{42} then \boxed{3}", 0.0),
        (r"\boxed{42}. This is the answer, since 6*7=42 and 5 is odd.", 1.0),
        (r"\boxed 42", 1.0),
        (r"\boxed{\fbox{42}}", 1.0),
        (r"\fbox{42}", 1.0),
        ("the answer is 42", 0.0),
        (r"I think 42. \boxed{}", 0.0),
        (r"\boxed{42", 0.0),
        (r"\boxed{42}\boxed{", 1.0),
        ("", 0.0),
    ],
)
def test_the_last_balanced_box_counts(response, expected):
    assert score(response, "42") == expected


@pytest.mark.parametrize(
    "box",
    [
        "9^9^9^9",
        "5^{5^{5^{5}}}",
        "100000!",
        "(((9!)!)!)!",
        "1" * 1_000_000,
        "{" * 400 + "1" + "}" * 400,
        "(" * 400 + "1" + ")" * 400,
        "2^" * 300 + "2",
        "-" * 900 + "1",
        "1+" * 400 + "2",
        r"\sqrt{" * 100 + "2" + "}" * 100,
        r"\frac{1}{" * 38 + "2" + "}" * 38,
        r"\pm" * 300,
        r"\binom{1000000}{500000}",
        r"\exp(\exp(\exp(\exp(9))))",
        r"\sinh(\sinh(\sinh(20)))",
        r"\sin(10^{5000})",
        r"(1+\frac{1}{7})^{20000}",
        "(x+y+z)^{50000}",
        r"\tan " * 150 + "x",
        "1," * 490 + "2",
        r"\boxed{" * 2000,
        r"\text{" * 300,
        "1 000 " * 160,
        " " * 100_000 + "1",
        "0." + "9" * 900,
        r"\begin{pmatrix}" + "1&" * 400 + r"\end{pmatrix}",
    ],
    ids=lambda box: box[:24],
)
def test_monstrous_boxes_are_graded_quickly(box):
    start = time.process_time()
    assert score(rf"\boxed{{{box}}}", "x+42") == 0.0
    assert score(rf"\boxed{{{box}}}", rf"\pi+{box[:1000]}") == 0.0
    assert time.process_time() - start < 2.0


def test_no_malformed_box_raises():
    source = "".join(text + " " for pair in EQUAL + DIFFERENT for text in pair if len(text) < 200)
    pieces = [piece for piece in re.split(r"(\\[A-Za-z]+|.)", source) if piece]
    generator = random.Random(0)
    for _ in range(3000):
        box = "".join(generator.choices(pieces, k=generator.randint(1, 16)))
        assert score(rf"\boxed{{{box}}}", r"\frac{\sqrt{x}}{17}") == 0.0


def test_grades_in_many_threads_at_once():
    verdicts = {}

    def work(number: int) -> None:
        boxes = [r"\boxed{\frac{1}{3}}", r"\boxed{\sqrt{12}}", r"\boxed{9^9^9^9}", rf"\boxed{{{number}}}"]
        verdicts[number] = [
            score(box, answer) for box, answer in zip(boxes, ["1/3", r"2\sqrt3", "1", "3"], strict=True)
        ]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {number: [1.0, 1.0, 0.0, float(number == 3)] for number in range(8)}


def test_an_empty_answer_is_reported():
    with pytest.raises(ValueError, match="answer is empty"):
        score(r"\boxed{1}", " ")


def test_answers_and_responses_pair_up():
    with pytest.raises(ValueError, match="shorter"):
        MathBoxedRewardScorer().score(["a", "b"], ["a"])
