"""Drawing by inverse CDF: the right frequencies, and no token that must not be drawn."""

import pytest
import torch

from unirl.rollout.native.sampling import Drawn, UniformStreams, draw
from unirl.types import SamplingParams

PROBS = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])
ALMOST_ONE = 1 - 2**-53


def draw_grid(probs: torch.Tensor, size: int = 10_000, **params) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and log-probs for `size` uniforms spread evenly over [0, 1)."""
    return draw_with_support(probs, size, **params)[:2]


def draw_with_support(probs: torch.Tensor, size: int = 10_000, **params) -> Drawn:
    uniforms = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    return draw(probs.log().expand(size, -1), uniforms, SamplingParams(max_new_tokens=1, **params))


def frequencies(tokens: torch.Tensor, vocab_size: int = 5) -> torch.Tensor:
    return tokens.bincount(minlength=vocab_size) / len(tokens)


def test_frequencies_are_the_probabilities():
    tokens, log_probs = draw_grid(PROBS)
    torch.testing.assert_close(frequencies(tokens), PROBS, atol=2e-4, rtol=0)
    torch.testing.assert_close(log_probs, PROBS.log()[tokens])


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_temperature(temperature):
    expected = torch.log_softmax(PROBS.log() / temperature, -1)
    tokens, log_probs = draw_grid(PROBS, temperature=temperature)
    torch.testing.assert_close(frequencies(tokens), expected.exp(), atol=2e-4, rtol=0)
    torch.testing.assert_close(log_probs, expected[tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("params", "support"),
    [
        ({"top_p": 0.8}, 2),
        ({"top_p": 0.81}, 3),
        ({"top_p": 0.01}, 1),
        ({"top_k": 3}, 3),
        ({"top_k": 1}, 1),
        ({"top_k": 99}, 5),
        ({"top_k": 0}, 5),
        ({"top_k": 4, "top_p": 0.85}, 3),
    ],
)
def test_filters_narrow_the_support_and_leave_the_log_probs(params, support):
    shuffled = torch.tensor([3, 0, 4, 2, 1])
    tokens, log_probs = draw_grid(PROBS[shuffled], **params)
    kept = PROBS * (torch.arange(5) < support)
    torch.testing.assert_close(frequencies(tokens), (kept / kept.sum())[shuffled], atol=2e-4, rtol=0)
    torch.testing.assert_close(log_probs, PROBS[shuffled].log()[tokens])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("params", "size"), [({"top_k": 3}, 3), ({"top_k": 4, "top_p": 0.8}, 2), ({"top_k": 5, "top_p": 0.01}, 1)]
)
def test_the_support_and_log_probs_renormalised_over_it(params, size, temperature):
    """The tokens drawn are those that are drawn when nobody asks for the support."""
    shuffled = torch.tensor([3, 0, 4, 2, 1])
    found = draw_with_support(PROBS[shuffled], temperature=temperature, return_support=True, **params)
    expected = shuffled.argsort()[:size]
    assert found.support.shape == (10_000, params["top_k"])
    assert {tuple(row) for row in found.support.tolist()} == {(*expected.tolist(), *[-1] * (params["top_k"] - size))}
    kept = (PROBS[:size].log() / temperature).log_softmax(-1)
    torch.testing.assert_close(found.log_probs, kept[shuffled[found.tokens]], atol=1e-6, rtol=0)
    silent = draw_with_support(PROBS[shuffled], temperature=temperature, **params)
    assert torch.equal(found.tokens, silent.tokens)
    assert silent.support is None


def test_a_token_of_probability_zero_is_in_no_support():
    found = draw_with_support(torch.tensor([0.0, 0.7, 0.0, 0.3]), top_k=4, return_support=True)
    assert found.support.unique(dim=0).tolist() == [[1, 3, -1, -1]]


@pytest.mark.parametrize("params", [{"top_p": 0.5}, {"top_k": 0}, {"top_k": 3, "temperature": 0.0}])
def test_a_support_without_a_bound_cannot_be_asked_for(params):
    with pytest.raises(ValueError, match="expected top_k >= 1 and temperature > 0"):
        SamplingParams(1, return_support=True, **params)


def test_temperature_zero_takes_the_likeliest_token():
    tokens, log_probs = draw_grid(PROBS, size=10, temperature=0.0, top_p=0.5)
    assert tokens.tolist() == [0] * 10
    torch.testing.assert_close(log_probs, PROBS.log()[tokens])


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE, 1.0])
def test_a_token_of_probability_zero_is_never_drawn(uniform):
    logits = torch.full((3, 1000), float("-inf"))
    logits[0, 1:999] = 0.0
    logits[1, 500] = 3.0
    logits[2, 10:20] = torch.linspace(-80, 10, 10)
    tokens, log_probs, _ = draw(logits, torch.full((3,), uniform, dtype=torch.float64), SamplingParams(1))
    assert logits[torch.arange(3), tokens].isfinite().all()
    assert log_probs.isfinite().all()
    if uniform >= ALMOST_ONE:
        assert tokens.tolist() == [998, 500, 19]


def test_a_large_vocabulary_stays_in_range():
    logits = torch.randn(4, 151_936, generator=torch.Generator().manual_seed(0)) * 4
    for uniform in (0.0, ALMOST_ONE):
        tokens, log_probs, _ = draw(logits, torch.full((4,), uniform, dtype=torch.float64), SamplingParams(1))
        expected = torch.log_softmax(logits.double(), -1)[torch.arange(4), tokens]
        torch.testing.assert_close(log_probs.double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad):
    logits = torch.zeros(3, 9)
    logits[1, 4] = bad
    with pytest.raises(FloatingPointError):
        draw(logits, torch.full((3,), 0.5, dtype=torch.float64), SamplingParams(1))


def test_streams_go_on_when_rows_are_dropped():
    device = torch.device("cpu")
    alone = UniformStreams([5], device)
    expected = torch.cat([alone.next() for _ in range(200)])
    streams = UniformStreams([4, 5, 6], device)
    found = []
    for step in range(200):
        if step == 10:
            streams.keep(torch.tensor([1, 2]))
        if step == 150:
            streams.keep(torch.tensor([0]))
        found.append(streams.next()[0 if step >= 10 else 1])
    assert torch.equal(torch.stack(found), expected)
    assert len(set(expected.tolist())) == 200
