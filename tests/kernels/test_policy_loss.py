"""fused_policy_loss against dense float64 log-probs under unirl.algorithms and autograd; what it does to storage."""

import pytest
import torch

from tests.kernels.dense import assert_gradient, assert_values, dense
from tests.kernels.policy import CONFIGS, surrogate, token_inputs
from unirl.kernels import FusedPolicyLoss, fused_policy_loss, token_logprob

# rows, columns of storage, real vocabulary, temperature
SIZES = [(0, 11, 11, 1.0), (1, 1, 1, 0.6), (63, 64, 11, 0.6), (16, 5003, 4999, 1.3), (2, 152_064, 151_936, 1.0)]


def rows_of(rows: int, width: int, vocab: int, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (2 * torch.randn(rows, width)).to(dtype)
    logits[:, vocab:] = 50.0  # padding that would win every maximum
    return logits, torch.randint(vocab, (rows,))


def expect(config, logits, targets, inputs, *, vocab, temperature, scale=1.0, logp=None):
    """(loss, dense values, losses of the tokens, d loss / d logits) in float64, all times `scale`.

    `logp` [T]: where to evaluate the token losses; the kernel does so at its own log-probs, rounded to float32.
    """
    nothing = torch.zeros(2, targets.numel(), dtype=torch.float64)
    exact = dense(logits, targets, vocab, temperature, nothing)
    token = {name: value.double() for name, value in inputs.items() if name != "loss_mask"}
    logp = exact.logp if logp is None else logp.double()
    policy = surrogate(config, logp, token["old_logp"], token["anchor_logp"], token["advantages"])
    mask = inputs["loss_mask"]
    weights, entropy_weights = token["weights"] * mask, token["entropy_weights"] * mask
    loss = (weights * policy.loss).sum() - (entropy_weights * exact.entropy).sum()
    grads = scale * torch.stack([weights * policy.derivative, -entropy_weights])
    return loss * scale, exact, policy, dense(logits, targets, vocab, temperature, grads).gradient


def run(logits, targets, config, inputs, *, backend, scale=1.0, **options) -> tuple[FusedPolicyLoss, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    found = fused_policy_loss(leaf * 1, targets, config, backend=backend, **inputs, **options)
    (scale * found.loss).backward()
    return found, leaf.grad


def some_inputs(logits, targets, vocab, temperature) -> dict[str, torch.Tensor]:
    return token_inputs(dense(logits, targets, vocab, temperature, torch.zeros(2, targets.numel())).logp)


def check(backend, config, rows, width, vocab, temperature, dtype=torch.float32, scale=1.0) -> None:
    logits, targets = rows_of(rows, width, vocab, dtype)
    inputs = some_inputs(logits, targets, vocab, temperature)
    options = {"vocab": vocab, "temperature": temperature}
    found, found_gradient = run(logits, targets, config, inputs, backend=backend, scale=scale, **options)
    loss, exact, policy, gradient = expect(config, logits, targets, inputs, **options, scale=scale, logp=found.logp)
    mask = inputs["loss_mask"]
    torch.testing.assert_close(scale * found.loss.detach().double(), loss, rtol=2e-6, atol=2e-6)
    assert_values(found.logp, torch.where(mask, exact.logp, 0))
    assert_values(found.entropy, torch.where(mask, exact.entropy, 0))
    torch.testing.assert_close(found.ratio.double(), torch.where(mask, policy.ratio, 1), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(found.token_loss.double(), torch.where(mask, policy.loss, 0), rtol=5e-6, atol=5e-6)
    assert torch.equal(found.clipped_upper, policy.upper & mask)
    assert torch.equal(found.clipped_lower, policy.lower & mask)
    assert_gradient(found_gradient, gradient)
    assert (found_gradient[~mask] == 0).all()
    assert (found_gradient[:, vocab:] == 0).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_loss(backend, name):
    check(backend, CONFIGS[name], 40, 300, 290, 0.7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "width", "vocab", "temperature"), SIZES)
def test_sizes(backend, dtype, rows, width, vocab, temperature):
    check(backend, CONFIGS["drpo"], rows, width, vocab, temperature, dtype)


@pytest.mark.parametrize("scale", [0.5, -3.0, 0.0])
def test_an_incoming_gradient_scales(backend, scale):
    check(backend, CONFIGS["ppo"], 20, 300, 300, 1.0, scale=scale)


def test_float64_stays_float64():
    logits, targets = rows_of(12, 400, 390, torch.float64)
    inputs = {name: value.double() for name, value in some_inputs(logits, targets, 390, 0.6).items()}
    inputs["loss_mask"] = inputs["loss_mask"].bool()
    options = {"vocab": 390, "temperature": 0.6}
    loss, _, _, gradient = expect(CONFIGS["sapo"], logits, targets, inputs, **options)
    found, found_gradient = run(logits, targets, CONFIGS["sapo"], inputs, backend="auto", **options)
    torch.testing.assert_close(found.loss.detach(), loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_gradient, gradient, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("with_entropy", [False, True])
def test_equal_to_two_kernels_bit_for_bit(backend, with_entropy):
    """The same log-probs as token_logprob, so that the ratio to a pass before the update is 1 exactly."""
    logits, targets = rows_of(32, 4099, 4099)
    logp, entropy = token_logprob(logits, targets, temperature=0.6, with_entropy=with_entropy, backend=backend)
    inputs = token_inputs(logp) | {"old_logp": logp, "anchor_logp": None, "entropy_weights": None}
    inputs["loss_mask"] = torch.ones(32, dtype=torch.bool)
    found, _ = run(
        logits, targets, CONFIGS["drpo"], inputs, backend=backend, temperature=0.6, with_entropy=with_entropy
    )
    assert torch.equal(found.logp, logp)
    assert (found.ratio == 1).all()
    if with_entropy:
        assert torch.equal(found.entropy, entropy)
    else:
        assert found.entropy is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_that_take_no_part_are_not_read(backend, dtype):
    """Masked rows full of NaN, and rows whose terms are not finite: zeros, and nothing of them anywhere else."""
    logits, targets = rows_of(12, 500, 490, dtype)
    inputs = some_inputs(logits, targets, 490, 1.0) | {"loss_mask": torch.ones(12, dtype=torch.bool)}
    inputs["loss_mask"][3] = False
    clean, clean_gradient = run(logits, targets, CONFIGS["ppo"], inputs, backend=backend, vocab=490)
    logits[3] = torch.nan
    poisoned = {name: value.clone() for name, value in inputs.items()}
    for name in ("old_logp", "anchor_logp", "advantages", "weights", "entropy_weights"):
        poisoned[name][3] = torch.nan
    found, gradient = run(logits, targets, CONFIGS["ppo"], poisoned, backend=backend, vocab=490)
    assert torch.equal(found.loss, clean.loss)
    assert torch.equal(gradient, clean_gradient)
    assert (gradient[3] == 0).all()
    assert (found.logp[3], found.entropy[3], found.ratio[3], found.token_loss[3]) == (0, 0, 1, 0)
    poisoned["loss_mask"][3] = True  # not masked, but nothing can be computed of it
    again, gradient = run(logits, targets, CONFIGS["ppo"], poisoned, backend=backend, vocab=490)
    assert torch.equal(again.loss, clean.loss)
    assert torch.equal(gradient, clean_gradient)


def test_rows_without_a_slope_are_zeros(backend):
    """Advantage 0, rejected (weight 0) or clipped: reported like any other row, and without gradient."""
    logits, targets = rows_of(3, 300, 300)
    logp, _ = token_logprob(logits, targets, backend=backend)
    inputs = {
        "old_logp": logp - torch.tensor([0.0, 0.0, 1.0]),  # the last ratio is e
        "advantages": torch.tensor([0.0, 1.0, 1.0]),
        "weights": torch.tensor([1.0, 0.0, 1.0]),
        "loss_mask": torch.ones(3, dtype=torch.bool),
    }
    found, gradient = run(logits, targets, CONFIGS["ppo"], inputs, backend=backend)
    assert (gradient == 0).all()
    assert torch.equal(found.logp, logp)
    assert found.clipped_upper.tolist() == [False, False, True]


def test_rows_that_are_not_finite_are_dropped(backend):
    logits, targets = rows_of(5, 300, 300)
    logits[0], logits[1, 7], logits[2, targets[2]] = -torch.inf, torch.nan, -torch.inf
    inputs = some_inputs(logits, targets, 300, 1.0) | {"loss_mask": torch.ones(5, dtype=torch.bool)}
    for name in ("old_logp", "anchor_logp"):
        inputs[name] = torch.full((5,), -1.0)
    found, gradient = run(logits, targets, CONFIGS["drpo"], inputs, backend=backend)
    alone = {name: value[3:] for name, value in inputs.items()}
    expected, expected_gradient = run(logits[3:], targets[3:], CONFIGS["drpo"], alone, backend=backend)
    torch.testing.assert_close(found.loss, expected.loss)
    assert (gradient[:3] == 0).all()
    torch.testing.assert_close(gradient[3:], expected_gradient, rtol=1e-6, atol=1e-8)
    assert not found.logp[:3].isfinite().any()


def test_the_gradient_is_there_after_the_forward_pass(backend):
    logits, targets = rows_of(6, 300, 300)
    inputs = some_inputs(logits, targets, 300, 1.0)
    gradient = expect(CONFIGS["drpo"], logits, targets, inputs, vocab=300, temperature=1.0)[3]
    own = logits.clone().requires_grad_() * 1
    found = fused_policy_loss(own, targets, CONFIGS["drpo"], backend=backend, **inputs)
    assert_gradient(own.detach(), gradient)
    assert torch.autograd.grad(found.loss, own)[0].data_ptr() == own.data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_without_autograd_the_logits_stay(backend, mode):
    logits, targets = rows_of(6, 300, 300)
    inputs, before = some_inputs(logits, targets, 300, 1.0), logits.clone()
    with mode():
        found = fused_policy_loss(logits, targets, CONFIGS["drpo"], backend=backend, **inputs)
    assert torch.equal(logits, before)
    assert not found.loss.requires_grad
    expected = run(logits, targets, CONFIGS["drpo"], inputs, backend=backend)[0]
    torch.testing.assert_close(found.loss, expected.loss.detach(), rtol=1e-6, atol=1e-7)


def test_used_logits_are_refused(backend):
    logits, targets = rows_of(6, 300, 300)
    inputs = some_inputs(logits, targets, 300, 1.0)
    own = logits.requires_grad_() * 1
    other = own.sin().sum()  # saves its input
    found = fused_policy_loss(own, targets, CONFIGS["drpo"], backend=backend, **inputs)
    with pytest.raises(RuntimeError, match="overwritten with their gradient"):
        token_logprob(own, targets, backend=backend)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    found.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.loss.backward()


def test_rows_that_lie_apart(backend):
    buffer = torch.randn(5, 777)
    canary, targets = buffer.clone(), torch.randint(699, (5,))
    inputs = some_inputs(buffer[:, 3:704], targets, 699, 1.0)
    expected = run(buffer[:, 3:704].contiguous(), targets, CONFIGS["spo"], inputs, backend=backend, vocab=699)[1]
    own = buffer.detach()[:, 3:704].requires_grad_()
    fused_policy_loss(own, targets, CONFIGS["spo"], backend=backend, vocab=699, **inputs)
    torch.testing.assert_close(buffer[:, 3:704], expected)
    assert torch.equal(buffer[:, :3], canary[:, :3])
    assert torch.equal(buffer[:, 704:], canary[:, 704:])


def test_terms_that_do_not_fit():
    logits, targets = rows_of(3, 300, 300)
    inputs = token_inputs(torch.zeros(3)) | {"weights": torch.ones(2)}
    with pytest.raises(ValueError, match=r"weights: found shape \(2,\).*\(3,\)"):
        fused_policy_loss(logits, targets, CONFIGS["drpo"], **inputs)
