"""Weights that reach a real server through files, and what is done about those that do not."""

import copy
from dataclasses import replace

import pytest
import torch

from tests.rollout.conftest import reference_log_probs
from tests.rollout.sglang.conftest import perturbed, weights_of, while_generating
from unirl.rollout.sglang import Update, WeightSyncError
from unirl.rollout.weights import LocalWeights
from unirl.types import GenerationRequest, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

REQUEST = GenerationRequest(tuple(range(3, 40)), SamplingParams(24), (0, 1, 2))


def assert_holds(engine, model) -> None:
    """The prompt is long, and cached from the time of other weights unless that was flushed."""
    for sample in engine.generate([REQUEST])[0]:
        expected = reference_log_probs(model, REQUEST.prompt_ids, sample.token_ids)
        torch.testing.assert_close(torch.tensor(sample.log_probs), expected, atol=1e-4, rtol=0)


def test_new_weights_are_sampled_from(published, model):
    assert_holds(published, model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for (_, value), (_, new) in zip(weights_of(other), perturbed(model), strict=True):
            value.copy_(new)
    version = published.weight_version + 1
    published.update_weights(weights_of(other), version)
    assert published.weight_version == version
    assert published.generate([REQUEST])[0][0].weight_versions == (version,) * 24
    assert_holds(published, other)
    metrics = published.metrics()
    assert 0 < metrics["sync/gb_per_s"] < 100


def test_an_update_between_the_tokens_of_a_sample(published, model):
    before = published.weight_version

    def update() -> None:
        published.pause("retract")
        published.update_weights(perturbed(model), before + 1)
        published.resume()

    samples = while_generating(published, update)
    assert {sample.weight_versions[0] for sample in samples} == {before, before + 1}
    crossing = [sample for sample in samples if len(set(sample.weight_versions)) == 2]
    assert crossing
    assert all(list(sample.weight_versions) == sorted(sample.weight_versions) for sample in crossing)


@pytest.mark.parametrize("fault", ["missing", "not in the model", "wrong shape", "given twice"])
def test_weights_of_another_model_reach_no_server(published, model, fault):
    weights, version = perturbed(model), published.weight_version
    if fault == "missing":
        weights = weights[:-1]
    elif fault == "not in the model":
        weights.append(("model.extra.weight", torch.zeros(2)))
    elif fault == "wrong shape":
        weights[3] = (weights[3][0], weights[3][1][:-1])
    else:
        weights.append(weights[0])
    with pytest.raises(ValueError, match=fault):
        published.update_weights(weights, version + 1)
    assert published.weight_version == version
    assert_holds(published, model)


def test_a_refused_update_is_an_error_and_mended_by_the_next(published, model, monkeypatch):
    transfer = published._transfer
    monkeypatch.setattr(transfer, "stage", lambda update: list(update.stream()))
    monkeypatch.setattr(transfer, "_staged", transfer._root / "nowhere")
    with pytest.raises(WeightSyncError, match=r"refused the weights(.|\n)*nowhere(.|\n)*the end of .*sglang_0\.log"):
        published.update_weights(perturbed(model), published.weight_version + 1)
    with pytest.raises(WeightSyncError, match="the last weight update failed"):
        published.generate([REQUEST])
    monkeypatch.undo()
    published.update_weights(weights_of(model), published.weight_version + 2)
    assert_holds(published, model)


def test_weights_that_arrive_changed_are_found_by_their_checksums(published, model, monkeypatch):
    transfer, name = published._transfer, "model.layers.1.mlp.up_proj.weight"
    stage = transfer.stage

    def stage_damaged(update: Update) -> None:
        damaged = [(key, value + 1e-6 * (key == name)) for key, value in update.stream()]
        stage(replace(update, weights=LocalWeights.holding(damaged), sums=None))

    monkeypatch.setattr(transfer, "stage", stage_damaged)
    with pytest.raises(WeightSyncError, match=r"1 of 18 weights differ .* model\.layers\.1\.mlp\.gate_up_proj\.weight"):
        published.update_weights(weights_of(model), published.weight_version + 1)


def test_one_version_stays_on_disk(published, model):
    root = published._transfer._root
    published.update_weights(weights_of(model), published.weight_version + 1)
    assert [path.name for path in root.iterdir()] == [f"version_{published.weight_version}"]
