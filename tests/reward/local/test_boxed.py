import pytest

from unirl.reward.local.boxed import last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{5}", "5"),
        (r"\boxed {5}", "5"),
        (r"\boxed 5", "5"),
        (r"\boxed -12.5 km", "-12.5"),
        (r"\boxed 1,000, and so on", "1,000"),
        (r"\boxed\pi", r"\pi"),
        (r"\boxed x", "x"),
        (r"\fbox{5}", "5"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a{b{c}d}e} and {more}", "a{b{c}d}e"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{x}", r"\left\{x"),
        (r"\boxed{1}, \boxed{2}", "2"),
        (r"\boxed{x=\boxed{5}}", r"x=\boxed{5}"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{open \boxed{2}", "2"),
        (r"} } \boxed{2} }", "2"),
        (r"{ \boxed{2}", "2"),
        (r"\boxed{}", ""),
        ("\\boxed{1\n+ 2}", "1\n+ 2"),
        (r"\boxedx{5}", None),
        (r"boxed{5}", None),
        (r"\boxed", None),
        (r"\boxed{5", None),
        ("no box", None),
    ],
)
def test_last_boxed(text, content):
    assert last_boxed(text) == content
