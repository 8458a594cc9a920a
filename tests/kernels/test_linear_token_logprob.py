"""linear_token_logprob against a dense head in float64: values, gradients of hidden states and head, and memory."""

import pytest
import torch

from tests.kernels.dense import dense
from tests.kernels.test_storage import LargestTensor
from unirl.kernels import linear_token_logprob, token_logprob

# tokens, hidden size, rows of the head, real vocabulary, chunk
SIZES = [
    (0, 8, 11, 11, None),
    (1, 1, 1, 1, 1),
    (63, 16, 400, 390, 10),
    (5, 16, 400, 400, None),
    (7, 4, 50_257, 50_257, 3),
]


def head_of(tokens: int, size: int, width: int, vocab: int, dtype=torch.float32):
    """hidden, weight, targets, and gradients of log-probs and entropies, half of which are 0 in the first chunk."""
    hidden, weight = torch.randn(tokens, size).to(dtype), torch.randn(width, size).to(dtype)
    weight[vocab:] = 50.0
    grads = torch.randn(2, tokens)
    grads[:, : tokens // 2] = 0
    return hidden, weight, torch.randint(vocab, (tokens,)), grads


def run(hidden, weight, targets, grads, **options):
    own_hidden, own_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logp, entropy = linear_token_logprob(own_hidden, own_weight, targets, with_entropy=True, **options)
    (grads[0] * logp + grads[1] * entropy).sum().backward()
    return logp.detach(), entropy.detach(), own_hidden.grad, own_weight.grad


def assert_close(found: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """`size`: of what was added up. Most of the error is of the head's products, up to 50,257 terms in float32."""
    assert ((found.double() - expected).abs() <= 3e-5 * (1 + size)).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("tokens", "size", "width", "vocab", "chunk"), SIZES)
def test_against_dense(backend, tokens, size, width, vocab, chunk, temperature):
    hidden, weight, targets, grads = head_of(tokens, size, width, vocab)
    options = {"vocab": vocab, "temperature": temperature, "chunk_tokens": chunk, "backend": backend}
    logp, entropy, grad_hidden, grad_weight = run(hidden, weight, targets, grads, **options)
    exact = dense(hidden.double() @ weight.double().T, targets, vocab, temperature, grads)
    assert_close(logp, exact.logp, exact.logp.abs())
    assert_close(entropy, exact.entropy, exact.entropy.abs())
    d_logits, weights, inputs = exact.gradient, weight.double(), hidden.double()
    assert_close(grad_hidden, d_logits @ weights, d_logits.abs() @ weights.abs())
    assert_close(grad_weight, d_logits.T @ inputs, d_logits.abs().T @ inputs.abs())
    assert (grad_weight[vocab:] == 0).all()


def test_float64_to_the_last_digits():
    hidden, weight, targets, grads = head_of(23, 16, 400, 390, torch.float64)
    found = run(hidden, weight, targets, grads.double(), vocab=390, temperature=1.3, chunk_tokens=4)
    exact = dense(hidden @ weight.T, targets, 390, 1.3, grads)
    expected = (exact.logp, exact.entropy, exact.gradient @ weight, exact.gradient.T @ hidden)
    for value, oracle in zip(found, expected, strict=True):
        torch.testing.assert_close(value, oracle, rtol=1e-11, atol=1e-11)


def test_bfloat16_adds_up_in_float32(backend):
    """64 chunks of one token: the head's gradient is no worse than that of one big product."""
    hidden, weight, targets, grads = head_of(64, 16, 300, 300, torch.bfloat16)
    options = {"backend": backend}
    logp, entropy, grad_hidden, grad_weight = run(hidden, weight, targets, grads, chunk_tokens=1, **options)
    assert logp.dtype == entropy.dtype == torch.float32
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    whole = run(hidden, weight, targets, grads, **options)
    exact = dense(hidden @ weight.T, targets, 300, 1.0, grads).gradient.T @ hidden.double()
    torch.testing.assert_close(logp, whole[0], rtol=0, atol=1e-2)  # the logits are rounded to bfloat16
    error = [(gradient.double() - exact).norm() for gradient in (grad_weight, whole[3])]
    assert error[0] <= 1.5 * error[1] + 1e-3


def test_equal_to_token_logprob_where_all_logits_fit(backend):
    hidden, weight, targets, _ = head_of(9, 16, 400, 390)
    logits = hidden @ weight.T
    expected = token_logprob(logits, targets, vocab=390, with_entropy=True, backend=backend)
    found = linear_token_logprob(hidden, weight, targets, vocab=390, with_entropy=True, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert linear_token_logprob(hidden, weight, targets, vocab=390, backend=backend)[1] is None


def test_memory_is_that_of_a_chunk(backend):
    tokens, size, width, chunk = 512, 8, 5000, 16
    hidden, weight, targets, grads = head_of(tokens, size, width, width)
    with LargestTensor() as largest:
        run(hidden, weight, targets, grads, chunk_tokens=chunk, backend=backend)
    assert largest.bytes <= 4 * max(chunk * width, width * size)


@pytest.mark.parametrize("wanted", ["hidden", "weight"])
def test_only_what_is_wanted(backend, wanted):
    hidden, weight, targets, _ = head_of(9, 16, 400, 400)
    (hidden if wanted == "hidden" else weight).requires_grad_()
    logp, _ = linear_token_logprob(hidden, weight, targets, chunk_tokens=4, backend=backend)
    logp.sum().backward()
    assert (hidden.grad is None) == (wanted == "weight")
    assert (weight.grad is None) == (wanted == "hidden")


def test_a_second_backward_pass_is_right(backend):
    """Nothing that was saved is overwritten: the logits are computed again."""
    hidden, weight, targets, _ = head_of(9, 16, 400, 400)
    hidden.requires_grad_()
    logp, _ = linear_token_logprob(hidden, weight, targets, chunk_tokens=4, backend=backend)
    first, second = (torch.autograd.grad(logp.sum(), hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("stale", ["hidden", "weight"])
def test_changed_inputs_are_an_error(stale):
    """The backward pass needs what the forward pass saw: an update of the head in between must not pass unseen."""
    hidden, weight, targets, _ = head_of(9, 16, 400, 400)
    tensors = {"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_()}
    logp, _ = linear_token_logprob(hidden, weight, targets)
    with torch.no_grad():
        tensors[stale].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"hidden": torch.zeros(3, 5)}, ValueError, r"\(3, 5\) and \(7, 4\)"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, ValueError, r"targets \[T\], T = 3 as of hidden, got \(2,\)"),
        ({"weight": torch.zeros(7, 4).double()}, TypeError, "one float dtype"),
        ({"chunk_tokens": 0}, ValueError, "chunk_tokens=0"),
        ({"temperature": 0.0}, ValueError, r"temperature=0\.0"),
        ({"vocab": 9}, ValueError, "vocab=9 does not fit"),
        ({"vocab": 6, "targets": torch.tensor([0, 6, 1])}, ValueError, r"expected \[0, 6\)"),
    ],
)
def test_refusals(changes, error, words):
    call = {"hidden": torch.zeros(3, 4), "weight": torch.zeros(7, 4), "targets": torch.tensor([0, 1, 2]), **changes}
    with pytest.raises(error, match=words):
        linear_token_logprob(**call)
