"""Values and gradients of token_logprob against dense float64, at awkward sizes and with awkward rows."""

import json
from pathlib import Path

import pytest
import torch

from tests.kernels.dense import assert_gradient, assert_values, dense
from unirl.kernels import token_logprob

DTYPES = [torch.float32, torch.bfloat16]
VECTORS = json.loads((Path(__file__).parents[1] / "vectors" / "token_logprob.json").read_text())
# rows, columns of storage, real vocabulary, temperature
SIZES = [
    (0, 11, 11, 1.0),
    (1, 1, 1, 0.6),
    (63, 11, 11, 1.3),
    (63, 64, 11, 0.6),
    (7, 1000, 999, 1.0),
    (3, 50_257, 50_257, 0.6),
    (3, 129_920, 129_920, 1.0),
    (2, 151_936, 151_936, 1.3),
    (2, 152_064, 151_936, 0.6),
]


def check(logits, targets, *, backend, temperature=1.0, vocab=None, grads=None) -> None:
    """Forward and backward of `logits` against the oracle; the forward pass must leave every byte alone."""
    vocab = vocab or logits.shape[1]
    grads = torch.randn(2, logits.shape[0]) if grads is None else grads
    expected = dense(logits, targets, vocab, temperature, grads)
    before = logits.clone()
    leaf = logits.detach().requires_grad_()
    logp, entropy = token_logprob(
        leaf, targets, temperature=temperature, vocab=vocab, with_entropy=True, backend=backend
    )
    assert torch.equal(logits.view(torch.uint8), before.view(torch.uint8))
    assert logp.dtype == entropy.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
    assert_values(logp, expected.logp)
    assert_values(entropy, expected.entropy)
    (grads[0] * logp + grads[1] * entropy).sum().backward()
    assert leaf.grad.dtype == logits.dtype
    assert_gradient(leaf.grad, expected.gradient)
    assert (leaf.grad[:, vocab:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "width", "vocab", "temperature"), SIZES)
def test_sizes(backend, dtype, rows, width, vocab, temperature):
    logits = (3 * torch.randn(rows, width)).to(dtype)
    logits[:, vocab:] = 50.0  # padding that would win every maximum
    check(logits, torch.randint(vocab, (rows,)), backend=backend, temperature=temperature, vocab=vocab)


def difficult_rows() -> tuple[torch.Tensor, torch.Tensor]:
    width = 5003
    logits = torch.randn(9, width, dtype=torch.float64)
    logits[0] += 50
    logits[1] += 80
    logits[2] -= 1e4
    logits[3, 7] = 1e4  # all the mass on one column
    logits[4, : width - 4] = -1e4
    logits[5, 17:4000] = -torch.inf
    logits[6] = 0.25  # uniform
    logits[7] *= 30
    logits[8, 1:] = -torch.inf
    targets = torch.tensor([5, 6, 7, 7, width - 4, 3, 0, 9, 0])
    return logits, targets


# at the last one, log2(e), log2(e) / temperature is 1 exactly
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3, 1.4426950408889634])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_and_infinite_logits(backend, dtype, temperature):
    logits, targets = difficult_rows()
    check(logits.to(dtype), targets, backend=backend, temperature=temperature)


def test_float64_stays_float64():
    logits, targets = difficult_rows()
    grads = torch.randn(2, 9, dtype=torch.float64)
    expected = dense(logits, targets, 5001, 0.6, grads)
    leaf = logits.requires_grad_()
    logp, entropy = token_logprob(leaf, targets, temperature=0.6, vocab=5001, with_entropy=True)
    (grads[0] * logp + grads[1] * entropy).sum().backward()
    for found, oracle in zip((logp, entropy, leaf.grad), expected, strict=True):
        torch.testing.assert_close(found, oracle, rtol=1e-11, atol=1e-11)


def test_very_cold_and_very_hot(backend):
    logits, targets = torch.randn(4, 300), torch.randint(300, (4,))
    for temperature in (1e-3, 1e3):
        check(logits.clone(), targets, backend=backend, temperature=temperature, grads=torch.ones(2, 4))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_lie_apart(backend, dtype):
    buffer = torch.randn(5, 777).to(dtype)
    canary = buffer.clone()
    check(buffer[:, 3:704], torch.randint(701, (5,)), backend=backend, temperature=0.6, vocab=699)
    assert torch.equal(buffer[:, :3], canary[:, :3])
    assert torch.equal(buffer[:, 704:], canary[:, 704:])


@pytest.mark.parametrize("vocab", [151_936, 129_920])
def test_no_phantom_columns(backend, vocab):
    logits = torch.full((2, 152_064), -30.0)
    logits[:, vocab:] = 0.0
    logp, entropy = token_logprob(logits, torch.tensor([0, vocab - 1]), vocab=vocab, with_entropy=True, backend=backend)
    exact = torch.tensor(float(vocab), dtype=torch.float64).log()
    assert_values(logp, (-exact).expand(2))
    assert_values(entropy, exact.expand(2))


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_conformance_vectors(backend, case):
    logits, targets = torch.tensor(case["inputs"]["logits"]), torch.tensor(case["inputs"]["targets"])
    results = token_logprob(logits, targets, **case["config"], with_entropy=True, backend=backend)
    for found, name in zip(results, ("logp", "entropy"), strict=True):
        torch.testing.assert_close(found, torch.tensor(case["expected"][name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_a_finite_logit(backend, dtype):
    logits = torch.randn(3, 5000).to(dtype)
    logits[1] = -torch.inf
    leaf = logits.clone().requires_grad_()
    targets = torch.tensor([1, 2, 3])
    logp, entropy = token_logprob(leaf, targets, with_entropy=True, backend=backend)
    assert logp[1] == -torch.inf
    assert entropy[1] == 0
    (logp[[0, 2]].sum() + entropy.sum() + logp[1] * 0.5).backward()
    expected = dense(logits[[0, 2]], targets[[0, 2]], 5000, 1.0, torch.ones(2, 2))
    assert_gradient(leaf.grad[[0, 2]], expected.gradient)
    assert (leaf.grad[1] == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [0, 2500, 4999])
def test_a_poisoned_row_stays_alone(backend, poison, column):
    logits = torch.randn(3, 5000)
    logits[1] = -torch.inf if column == 2500 else logits[1]
    logits[1, column] = poison
    leaf = logits.clone().requires_grad_()
    targets = torch.tensor([1, 2, 3])
    logp, entropy = token_logprob(leaf, targets, with_entropy=True, backend=backend)
    assert logp[1].isnan()
    assert entropy[1].isnan()
    weight = torch.tensor([1.0, 0.0, 1.0])  # masked: nothing may flow into the poisoned row
    torch.where(weight > 0, logp + entropy, 0.0).sum().backward()
    expected = dense(logits[[0, 2]], targets[[0, 2]], 5000, 1.0, torch.ones(2, 2))
    assert_gradient(leaf.grad[[0, 2]], expected.gradient)
    assert (leaf.grad[1] == 0).all()


def test_infinitely_unlikely_target(backend):
    logits = torch.randn(2, 50)
    logits[0, 3] = -torch.inf
    targets = torch.tensor([3, 4])
    logp, entropy = token_logprob(logits, targets, with_entropy=True, backend=backend)
    assert logp[0] == -torch.inf
    assert torch.isfinite(entropy).all()
    leaf = logits.clone().requires_grad_()
    logp, _ = token_logprob(leaf, targets, backend=backend)
    logp.backward(torch.tensor([0.5, 1.0]))
    assert leaf.grad[0, 3] == 0.5
    assert torch.isfinite(leaf.grad).all()


def test_a_row_does_not_depend_on_its_batch_nor_on_the_entropy(backend):
    """Two passes over one batch, split in any way, give one log-prob bit for bit: the first KL is exactly 0."""
    logits, targets = torch.randn(8, 4099), torch.randint(4099, (8,))
    whole, _ = token_logprob(logits, targets, temperature=0.6, with_entropy=True, backend=backend)
    rows = [token_logprob(logits[i : i + 1], targets[i : i + 1], temperature=0.6, backend=backend)[0] for i in range(8)]
    if backend in ("cpu", "triton"):
        assert torch.equal(whole, torch.cat(rows))
    else:  # torch's own reductions may differ in the last place with the shape
        torch.testing.assert_close(whole, torch.cat(rows), rtol=2e-7, atol=0)


def test_only_one_of_the_results_is_used(backend):
    logits, targets, nothing = torch.randn(4, 300), torch.randint(300, (4,)), torch.zeros(4)
    for used in (0, 1):
        leaf = logits.clone().requires_grad_()
        token_logprob(leaf, targets, with_entropy=True, backend=backend)[used].sum().backward()
        grads = torch.stack([torch.ones(4), nothing] if used == 0 else [nothing, torch.ones(4)])
        assert_gradient(leaf.grad, dense(logits, targets, 300, 1.0, grads).gradient)


def test_threads_do_not_change_a_bit(backend):
    logits, targets = torch.randn(64, 4099), torch.randint(4099, (64,))
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            leaf = logits.clone().requires_grad_()
            logp, entropy = token_logprob(leaf, targets, with_entropy=True, backend=backend)
            (logp + entropy).sum().backward()
            results.append((logp, entropy, leaf.grad))
    finally:
        torch.set_num_threads(before)
    for one, three in zip(*results, strict=True):
        assert torch.equal(one, three)
