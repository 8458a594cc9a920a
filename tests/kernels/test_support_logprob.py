"""support_logprob and linear_support_logprob against a dense softmax in float64; tests of split vocabularies are with
those of the other kernels.
"""

import pytest
import torch

from tests.kernels.dense import assert_gradient, assert_values
from tests.kernels.supports import dense_support, make_support
from tests.kernels.test_linear_token_logprob import assert_close, head_of
from tests.kernels.test_storage import LargestTensor
from unirl.kernels import linear_support_logprob, linear_token_logprob, support_logprob, token_logprob

# rows, columns of storage, real vocabulary, largest support, temperature
SIZES = [
    (0, 11, 11, 3, 1.0),
    (0, 11, 11, 0, 1.0),
    (1, 1, 1, 1, 0.6),
    (63, 11, 11, 11, 1.3),
    (63, 64, 11, 7, 0.6),
    (7, 1000, 999, 128, 1.0),
    (3, 50_257, 50_257, 1024, 0.6),
    (2, 152_064, 151_936, 20, 1.3),
]


def run(logits, targets, support, grads, **options):
    leaf = logits.clone().requires_grad_()
    logp, entropy = support_logprob(leaf, targets, support, with_entropy=True, **options)
    (grads[0] * logp + grads[1] * entropy).sum().backward()
    return logp.detach(), entropy.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width", "vocab", "size", "temperature"), SIZES)
def test_against_dense(dtype, rows, width, vocab, size, temperature):
    logits = (3 * torch.randn(rows, width)).to(dtype)
    logits[:, vocab:] = torch.nan  # padding is not read
    before, targets = logits.clone(), torch.randint(vocab, (rows,))
    support, grads = make_support(targets, vocab, size), torch.randn(2, rows)
    found = run(logits, targets, support, grads, vocab=vocab, temperature=temperature)
    expected = dense_support(before.nan_to_num(), targets, support, vocab, temperature, grads)
    assert found[0].dtype == found[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert found[2].dtype == dtype
    for value, oracle in zip(found[:2], expected[:2], strict=True):
        assert_values(value, oracle)
    assert_gradient(found[2], expected.gradient)
    if dtype == torch.float64:
        torch.testing.assert_close(found, tuple(expected), rtol=1e-13, atol=1e-13)
    outside = torch.ones_like(logits, dtype=torch.bool).scatter(1, support.long().clamp(min=0), False)
    assert (found[2][outside] == 0).all()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [None, 1, 10])
@pytest.mark.parametrize(("tokens", "vocab"), [(0, 400), (63, 390), (5, 400)])
def test_linear_against_dense(tokens, vocab, chunk, temperature):
    hidden, weight, targets, grads = head_of(tokens, 16, 400, vocab)
    support = make_support(targets, vocab, 9)
    own_hidden, own_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    options = {"vocab": vocab, "temperature": temperature, "chunk_tokens": chunk, "with_entropy": True}
    logp, entropy = linear_support_logprob(own_hidden, own_weight, targets, support, **options)
    (grads[0] * logp + grads[1] * entropy).sum().backward()
    exact = dense_support(hidden.double() @ weight.double().T, targets, support, vocab, temperature, grads)
    assert_close(logp, exact.logp, exact.logp.abs())
    assert_close(entropy, exact.entropy, exact.entropy.abs())
    d_logits, weights, inputs = exact.gradient, weight.double(), hidden.double()
    assert_close(own_hidden.grad, d_logits @ weights, d_logits.abs() @ weights.abs())
    assert_close(own_weight.grad, d_logits.T @ inputs, d_logits.abs().T @ inputs.abs())


def test_the_whole_vocabulary_as_support_is_token_logprob():
    hidden, weight, targets, grads = head_of(9, 16, 400, 390)
    support = torch.stack([torch.randperm(390) for _ in range(9)]).int()
    logits = hidden @ weight.T
    found = run(logits, targets, support, grads, vocab=390)
    leaf = logits.clone().requires_grad_()
    expected = token_logprob(leaf, targets, vocab=390, with_entropy=True)
    (grads * torch.stack(expected)).sum().backward()
    for value, other in zip(found, (*expected, leaf.grad), strict=True):
        torch.testing.assert_close(value, other.detach(), rtol=1e-6, atol=1e-6)
    linear = linear_support_logprob(hidden, weight, targets, support, vocab=390)
    torch.testing.assert_close(linear[0], linear_token_logprob(hidden, weight, targets, vocab=390)[0])
    assert linear[1] is None


def test_one_token_alone_and_none_at_all():
    """A row without a token or without a finite logit is as one of `token_logprob`; a NaN stays in its row."""
    logits = 30 * torch.randn(5, 7)
    logits[2] = -torch.inf
    logits[3, 4] = torch.nan
    targets = torch.tensor([3, 3, 3, 3, 2])
    support = torch.tensor([[-1, 3, -1], [-1, -1, -1], [3, 5, -1], [3, 4, -1], [2, 3, 0]], dtype=torch.int32)
    logp, entropy, gradient = run(logits, targets, support, torch.ones(2, 5))
    assert logp[:3].tolist() == [0, -torch.inf, -torch.inf]
    assert entropy[:3].tolist() == [0, 0, 0]
    assert (gradient[:3] == 0).all()
    assert logp[3].isnan()
    assert gradient[3].isnan().sum() == 2
    assert logp[4].isfinite()
    assert gradient[4].isfinite().all()


def test_a_row_into_which_no_gradient_flows_is_zero_whatever_it_holds():
    logits = torch.full((2, 5), torch.nan)
    support = torch.arange(5, dtype=torch.int32).expand(2, 5)
    assert (run(logits, torch.tensor([1, 2]), support, torch.zeros(2, 2))[2] == 0).all()


def test_the_order_of_the_support_and_a_second_run_change_nothing():
    logits, targets, grads = torch.randn(40, 300), torch.randint(300, (40,)), torch.randn(2, 40)
    support = make_support(targets, 300, 17)
    first, again = (run(logits, targets, support, grads) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    for found, expected in zip(run(logits, targets, support.flip(1), grads), first, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_gradient_takes_the_storage_of_the_logits_and_little_else():
    rows, width, size = 256, 20_000, 16
    logits = torch.randn(rows, width, requires_grad=True) * 1
    targets = torch.randint(width, (rows,))
    support = make_support(targets, width, size)
    with LargestTensor() as largest:
        logp, entropy = support_logprob(logits, targets, support, with_entropy=True)
        gradient = torch.autograd.grad((logp + entropy).sum(), logits, retain_graph=True)[0]
    assert gradient.data_ptr() == logits.data_ptr()
    assert largest.bytes <= 8 * rows * size
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()
    with pytest.raises(RuntimeError, match="overwritten with their gradient"):
        support_logprob(logits, targets, support)


def test_chunks_bound_the_memory_of_the_linear_path():
    hidden, weight, targets, _ = head_of(512, 8, 5000, 5000)
    support = make_support(targets, 5000, 20)
    hidden.requires_grad_(), weight.requires_grad_()
    with LargestTensor() as largest:
        linear_support_logprob(hidden, weight, targets, support, chunk_tokens=16)[0].sum().backward()
    assert largest.bytes <= 4 * max(16 * 5000, 5000 * 8)


@pytest.mark.parametrize(
    ("support", "message"),
    [
        ([[1, 2]], r"expected support \[T, K\], T = 2 as of targets, got \(1, 2\)"),
        ([[1, 2], [2, 2]], "distinct tokens in each row"),
        ([[1, 5], [2, 1]], r"expected ids in \[0, 5\), or -1"),
        ([[1, -2], [2, 1]], r"expected ids in \[0, 5\), or -1"),
        ([[1, 2], [1, 3]], "each target among the tokens of its row"),
        ([[1, 0, 2, 3, 4, -1], [2, 0, 1, 3, 4, -1]], "6 tokens, more than the vocabulary of 5: lower top_k"),
    ],
)
def test_supports_that_cannot_be_are_refused(support, message):
    support, targets = torch.tensor(support, dtype=torch.int32), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=message):
        support_logprob(torch.randn(2, 8), targets, support, vocab=5)
    with pytest.raises(ValueError, match=message):
        linear_support_logprob(torch.randn(2, 3), torch.randn(8, 3), targets, support, vocab=5)


def test_ids_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match="expected int32 support"):
        support_logprob(torch.randn(2, 8), torch.tensor([1, 2]), torch.tensor([[1], [2]]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gpu_gives_what_the_cpu_gives_and_the_same_each_time(dtype):
    logits, targets = (3 * torch.randn(200, 5000)).to(dtype), torch.randint(5000, (200,))
    support, grads = make_support(targets, 5000, 50), torch.randn(2, 200)
    expected = run(logits, targets, support, grads, temperature=0.6)
    first, again = (run(*(x.cuda() for x in (logits, targets, support, grads)), temperature=0.6) for _ in range(2))
    for found, repeated, value in zip(first, again, expected, strict=True):
        assert torch.equal(found, repeated)
        torch.testing.assert_close(found.cpu(), value, rtol=1e-2 if value.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
