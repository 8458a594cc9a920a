import pytest
import torch

from tests.train.megatron.conftest import make_batches, weighted_loss
from unirl.errors import UserError

SETTINGS = {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1, "total_steps": 4}


def train(actor, seeds):
    results = []
    for seed in seeds:
        actor.forward_backward(make_batches(seed=seed, token_budget=80), weighted_loss)
        results.append(actor.optimizer_step())
    return results


def assert_same_weights(actor, other):
    for (name, weight), (other_name, other_weight) in zip(actor.export_weights(), other.export_weights(), strict=True):
        assert name == other_name
        assert torch.equal(weight, other_weight), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_and_two_steps_are_four_steps(tmp_path, make_folder, make_actor, dtype):
    folder, _ = make_folder()
    actor = make_actor(folder, dtype=dtype, **SETTINGS)
    train(actor, [1, 2])
    actor.save(tmp_path)
    resumed = make_actor(folder, dtype=dtype, **SETTINGS)
    resumed.load(tmp_path)
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        pairs = zip(
            actor.optimizer.masters(dict(actor.model.named_parameters())).values(),
            resumed.optimizer.masters(dict(resumed.model.named_parameters())).values(),
            strict=True,
        )
        for master, other in pairs:
            assert torch.equal(actor.optimizer.moments(master)[moment], resumed.optimizer.moments(other)[moment])
    assert train(resumed, [3, 4]) == train(actor, [3, 4])
    assert_same_weights(resumed, actor)


def test_each_save_holds_the_weights_of_its_moment(tmp_path, make_folder, make_actor):
    folder, _ = make_folder()
    actor, other = make_actor(folder, **SETTINGS), make_actor(folder, **SETTINGS)
    for step in range(2):
        place = tmp_path / str(step)
        place.mkdir()
        actor.save(place)  # the first one before any step: there are no moments yet
        other.load(place)
        assert other.optimizer.steps == step
        assert_same_weights(other, actor)
        train(actor, [step])


def test_loading_into_an_actor_that_has_trained_starts_over(tmp_path, make_folder, make_actor):
    folder, _ = make_folder()
    actor = make_actor(folder, **SETTINGS)
    actor.save(tmp_path)
    first = train(actor, [1, 2])
    actor.load(tmp_path)
    assert train(actor, [1, 2]) == first


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path, make_folder, make_actor):
    make_actor(make_folder("qwen3-tied")[0]).save(tmp_path)
    actor = make_actor(make_folder("qwen2-tied")[0])
    before = dict(actor.export_weights())
    with pytest.raises(UserError, match=r"another model than model\.path.*decoder\.layers\.0"):
        actor.load(tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in actor.export_weights())
