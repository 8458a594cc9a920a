"""What happens to the storage of the logits: untouched by the forward pass, the gradient's after the backward pass."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.dense import assert_gradient, dense
from unirl.kernels import token_logprob


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operator returns, other than views of tensors it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def produced(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A leaf, logits computed from it as a model's head does, and targets."""
    leaf = torch.randn(rows, width, requires_grad=True)
    return leaf, leaf * 1, torch.randint(width, (rows,))


def test_the_gradient_takes_the_storage_of_the_logits(backend):
    leaf, logits, targets = produced(5, 300)
    logp, _ = token_logprob(logits, targets, backend=backend)
    gradient = torch.autograd.grad(logp.sum(), logits)[0]
    assert gradient.data_ptr() == logits.data_ptr()
    assert_gradient(gradient, dense(leaf, targets, 300, 1.0, torch.tensor([[1.0] * 5, [0.0] * 5])).gradient)


def test_memory_is_linear_in_the_rows(backend):
    rows, width = 256, 20_000
    _, logits, targets = produced(rows, width)
    with LargestTensor() as largest:
        logp, entropy = token_logprob(logits, targets, with_entropy=True, backend=backend)
        gradient = torch.autograd.grad((logp + entropy).sum(), logits)[0]
    assert gradient.data_ptr() == logits.data_ptr()
    # The C++ kernels make nothing beyond five float64 per row; plain torch works in blocks of 4 MB.
    assert largest.bytes <= (5 * 8 * rows if backend == "cpu" else 4 << 20)


def test_forward_twice_leaves_the_logits_alone(backend):
    _leaf, logits, targets = produced(4, 300)
    logits.data[0] = -1e4
    before = logits.clone()
    first, _ = token_logprob(logits, targets, backend=backend)
    second, _ = token_logprob(logits, targets, backend=backend)
    assert torch.equal(first, second)
    assert torch.isfinite(first).all()
    assert torch.equal(logits, before)


def test_a_second_backward_is_an_error(backend):
    _leaf, logits, targets = produced(4, 300)
    logp, _ = token_logprob(logits, targets, backend=backend)
    logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logp.sum().backward()


def test_two_calls_on_one_storage_cannot_both_go_backward(backend):
    _leaf, logits, targets = produced(4, 300)
    first, _ = token_logprob(logits, targets, backend=backend)
    second, _ = token_logprob(logits, targets, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).sum().backward()


def test_another_reader_of_the_logits_is_an_error(backend):
    """sin() saves its input; its backward pass comes after ours and must not read gradients as logits."""
    _leaf, logits, targets = produced(4, 300)
    other = logits.sin().sum()
    logp, _ = token_logprob(logits, targets, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (logp.sum() + other).backward()


def test_the_producer_of_the_logits_may_need_them(backend):
    """tanh soft-capping saves its output: an error, and right with a clone."""
    leaf, targets = torch.randn(4, 300, requires_grad=True), torch.randint(300, (4,))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        token_logprob(leaf.tanh(), targets, backend=backend)[0].sum().backward()
    token_logprob(leaf.tanh().clone(), targets, backend=backend)[0].sum().backward()
    expected = torch.autograd.grad(torch.log_softmax(leaf.double().tanh(), 1).gather(1, targets[:, None]).sum(), leaf)[
        0
    ]
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-5, atol=1e-6)


def test_overwritten_logits_are_refused(backend):
    _leaf, logits, targets = produced(4, 300)
    token_logprob(logits, targets, backend=backend)[0].sum().backward()
    with pytest.raises(RuntimeError, match="overwritten with their gradient"):
        token_logprob(logits, targets, backend=backend)


def test_refilled_logits_are_welcome(backend):
    leaf, targets = torch.randn(4, 300, requires_grad=True), torch.randint(300, (4,))
    token_logprob(leaf, targets, backend=backend)[0].sum().backward()
    fresh, leaf.grad = torch.randn(4, 300), None
    with torch.no_grad():
        leaf.copy_(fresh)
    token_logprob(leaf, targets, backend=backend)[0].sum().backward()
    expected = dense(fresh, targets, 300, 1.0, torch.tensor([[1.0] * 4, [0.0] * 4]))
    assert_gradient(leaf.grad, expected.gradient)


def test_double_backward_is_an_error(backend):
    leaf, logits, targets = produced(4, 300)
    logp, _ = token_logprob(logits, targets, backend=backend)
    gradient = torch.autograd.grad(logp.sum(), leaf, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        gradient.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(backend, mode):
    with mode():
        logits, targets = torch.randn(4, 300), torch.randint(300, (4,))
        logp, _ = token_logprob(logits, targets, with_entropy=True, backend=backend)
    assert not logp.requires_grad
    torch.testing.assert_close(logp, torch.log_softmax(logits, 1).gather(1, targets[:, None])[:, 0])


def test_a_head_on_top(backend):
    """hidden -> logits -> loss, as in a model: gradients of hidden and weight against float64."""
    hidden, weight = torch.randn(6, 16, requires_grad=True), torch.randn(400, 16, requires_grad=True)
    targets, grads = torch.randint(390, (6,)), torch.randn(2, 6)
    logp, entropy = token_logprob(
        hidden @ weight.T, targets, temperature=1.3, vocab=390, with_entropy=True, backend=backend
    )
    (grads[0] * logp + grads[1] * entropy).sum().backward()
    d_logits = dense(hidden @ weight.T, targets, 390, 1.3, grads).gradient
    torch.testing.assert_close(hidden.grad.double(), d_logits @ weight.detach().double(), rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(weight.grad.double(), d_logits.T @ hidden.detach().double(), rtol=1e-5, atol=2e-6)
