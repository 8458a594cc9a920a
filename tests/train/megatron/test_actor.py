import pytest
import torch

from tests.train.megatron.conftest import (
    FAMILIES,
    assert_gradients_close,
    gradients_of,
    make_batches,
    reference_gradients,
    reference_log_probs,
    weighted_loss,
)
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.errors import UserError
from unirl.train.megatron.actor import MegatronActor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_those_of_transformers(make_folder, make_actor, family, temperature):
    folder, reference = make_folder(family)
    batches = make_batches(token_budget=80)
    assert len(batches) > 1
    found = make_actor(folder, temperature=temperature).log_probs(batches)
    for batch, (logp, entropy) in zip(batches, found, strict=True):
        with torch.no_grad():
            expected_logp, expected_entropy = reference_log_probs(reference, batch, temperature)
        assert logp.dtype == torch.float32
        assert not logp.requires_grad
        torch.testing.assert_close(logp, expected_logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(entropy, expected_entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_of_every_weight_equals_that_of_transformers(make_folder, make_actor, family):
    folder, reference = make_folder(family)
    (batch,) = make_batches()
    found = gradients_of(make_actor(folder, temperature=0.8), [batch])
    weighted_loss(batch, *reference_log_probs(reference, batch, 0.8))[0].backward()
    assert_gradients_close(found, reference_gradients(reference))


@pytest.mark.parametrize("family", ["qwen3-tied", "llama3-untied"])
def test_shared_prompts_change_nothing(make_folder, make_actor, family):
    folder, _ = make_folder(family)
    actor = make_actor(folder)
    (plain,), (shared,) = make_batches(), make_batches(share_prompts=True)
    assert shared.tokens.numel() < plain.tokens.numel()
    assert torch.equal(shared.targets, plain.targets)
    torch.testing.assert_close(actor.log_probs([shared]), actor.log_probs([plain]), atol=1e-5, rtol=0)
    assert_gradients_close(gradients_of(actor, [shared]), gradients_of(actor, [plain]))


@pytest.mark.parametrize("budget", [90, 29])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_any_split_into_micro_batches_gives_one_gradient(make_folder, make_actor, budget, share_prompts):
    folder, _ = make_folder()
    actor = make_actor(folder)
    split = make_batches(token_budget=budget, share_prompts=share_prompts)
    assert len(split) > 1
    expected = gradients_of(actor, make_batches())
    assert_gradients_close(gradients_of(actor, split), expected)


def test_log_probs_do_not_depend_on_the_packing(make_folder, make_actor):
    folder, _ = make_folder()
    actor = make_actor(folder)
    by_sample = {}
    for budget in (10_000, 90, 29):
        for batch, (logp, _) in zip(
            make_batches(token_budget=budget), actor.log_probs(make_batches(token_budget=budget)), strict=True
        ):
            for sample, row in zip(
                batch.sample_positions.tolist(), logp.split(batch.loss_cu_seqlens.diff().tolist()), strict=True
            ):
                by_sample.setdefault(sample, []).append(row)
    assert len(by_sample) == 11
    for first, *others in by_sample.values():
        for other in others:
            torch.testing.assert_close(other, first, atol=1e-5, rtol=0)


def test_forward_backward_starts_from_zero_and_returns_each_metrics(make_folder, make_actor):
    folder, _ = make_folder()
    actor = make_actor(folder)
    batches = make_batches(token_budget=80)
    metrics = actor.forward_backward(batches, weighted_loss)
    assert metrics == [{"tokens": batch.targets.numel()} for batch in batches]
    first = dict(actor.gradients())
    actor.forward_backward(batches, weighted_loss)
    assert all(torch.equal(gradient, first[name]) for name, gradient in actor.gradients())


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(make_folder, make_actor, recompute):
    folder, _ = make_folder()
    batches = make_batches(token_budget=80, share_prompts=True)
    expected = gradients_of(make_actor(folder), batches)
    found = gradients_of(make_actor(folder, recompute=recompute), batches)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3-untied"])
def test_logits_in_chunks_change_nothing(make_folder, make_actor, family):
    """Log-probs, and gradients of the head and of all behind it, with a few rows of logits at a time."""
    folder, _ = make_folder(family)
    batches = make_batches(token_budget=80)
    whole, chunked = make_actor(folder), make_actor(folder, logits_chunk_tokens=3)
    logits = []
    chunked.model.output_layer.register_forward_hook(lambda *args: logits.append(args))
    torch.testing.assert_close(chunked.log_probs(batches), whole.log_probs(batches), atol=1e-5, rtol=0)
    assert_gradients_close(gradients_of(chunked, batches), gradients_of(whole, batches))
    assert logits == []


def test_bfloat16_stays_close_to_float32(make_folder, make_actor):
    folder, _ = make_folder()
    (batch,) = make_batches()
    expected, _ = make_actor(folder).log_probs([batch])[0]
    actor = make_actor(folder, dtype="bfloat16")
    logp, entropy = actor.log_probs([batch])[0]
    assert logp.dtype == entropy.dtype == torch.float32
    assert (logp - expected).abs().mean() < 0.05
    assert all(gradient.dtype == torch.float32 for gradient in gradients_of(actor, [batch]).values())


def test_log_probs_keep_no_graph(make_folder, make_actor):
    """Megatron's layers switch gradients on for the residual; nothing may be kept for a backward pass all the same."""
    folder, _ = make_folder()
    actor = make_actor(folder)
    hidden = []
    for layer in actor.model.decoder.layers:
        layer.register_forward_hook(lambda module, args, output: hidden.append(output[0]))
    actor.log_probs(make_batches())
    assert len(hidden) == 2
    assert not any(output.requires_grad for output in hidden)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}, {"sequence_parallel": True}])
def test_other_layouts_are_refused_by_name(make_folder, sizes):
    folder, _ = make_folder()
    (name,) = sizes
    with pytest.raises(UserError, match=rf"parallel\.{name}"):
        MegatronActor(
            ModelConfig(path=str(folder)),
            parallel=ParallelConfig(**sizes),
            optimizer=OptimizerConfig(),
            stack=StackConfig(),
            temperature=1.0,
            total_steps=1,
            seed=0,
        )
