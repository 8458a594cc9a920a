import pytest
import torch

from tests.train.megatron.conftest import gradients_of, make_batches, weighted_loss

SETTINGS = {"lr": 3e-3, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "warmup_steps": 2}


def weights_of(actor):
    return dict(actor.export_weights())


def not_a_number(batch, logp, entropy):
    loss, metrics = weighted_loss(batch, logp, entropy)
    return loss * float("nan"), metrics


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e6])
def test_steps_equal_torch_adamw_by_hand(make_folder, make_actor, max_grad_norm):
    folder, _ = make_folder("qwen2-tied")
    actor = make_actor(folder, max_grad_norm=max_grad_norm, **SETTINGS)
    mirror = {name: torch.nn.Parameter(weight) for name, weight in actor.export_weights()}
    groups = [
        {"params": [p for p in mirror.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in mirror.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.8, 0.95), eps=1e-6)
    for lr in (1.5e-3, 3e-3, 3e-3):
        for name, gradient in gradients_of(actor, make_batches()).items():
            mirror[name].grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(mirror.values(), max_grad_norm)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        result = actor.optimizer_step()
        assert not result.skipped
        assert result.lr == lr
        assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)
        for name, weight in actor.export_weights():
            torch.testing.assert_close(weight, mirror[name].detach(), atol=1e-6, rtol=0)


def test_a_gradient_that_is_not_finite_changes_nothing(make_folder, make_actor):
    folder, _ = make_folder()
    actor, undisturbed = make_actor(folder, **SETTINGS), make_actor(folder, **SETTINGS)
    for each in (actor, undisturbed):
        each.forward_backward(make_batches(), weighted_loss)
        each.optimizer_step()
    before = weights_of(actor)
    actor.forward_backward(make_batches(), not_a_number)
    result = actor.optimizer_step()
    assert result.skipped
    assert result.grad_norm != result.grad_norm
    assert all(torch.equal(weight, before[name]) for name, weight in actor.export_weights())
    for each in (actor, undisturbed):
        each.forward_backward(make_batches(), weighted_loss)
    assert actor.optimizer_step() == undisturbed.optimizer_step()
    expected = weights_of(undisturbed)
    assert all(torch.equal(weight, expected[name]) for name, weight in actor.export_weights())


def test_bfloat16_weights_have_float32_masters_that_small_steps_move(make_folder, make_actor):
    folder, _ = make_folder()
    actor = make_actor(folder, dtype="bfloat16", lr=1e-6, weight_decay=0.0)
    parameters = dict(actor.model.named_parameters())
    masters = {name: actor.optimizer.shard_of(parameter).master for name, parameter in parameters.items()}
    before = {name: master.clone() for name, master in masters.items()}
    batches = make_batches()
    for _ in range(100):
        actor.forward_backward(batches, weighted_loss)
        actor.optimizer_step()
    changed = total = 0
    for name, master in masters.items():
        assert master.dtype == torch.float32
        assert torch.equal(parameters[name], master.bfloat16())
        # A token that occurs nowhere has no gradient where embeddings are not tied to the head; here they are.
        changed += int((master != before[name]).sum())
        total += master.numel()
    assert changed > 0.99 * total
