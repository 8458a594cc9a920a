"""A real server on two tensor-parallel ranks: what it samples, and that weights reach both by every way."""

import pytest

from tests.rollout.sglang.conftest import OVERRIDES, perturbed, weights_of
from tests.rollout.sglang.test_live_sync import LIMIT_S, TRANSFERS, attached
from tests.rollout.sglang.test_weights import REQUEST, assert_holds
from unirl.config import compose
from unirl.trainer.sglang_setup import make_sglang_engine

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two_ranks(sglang_python, recipe_dir, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("tp2")
    engine = make_sglang_engine(compose("tiny", [*OVERRIDES, "rollout.tp=2", f"run_dir={run_dir}"], [recipe_dir]))
    engine.run(engine._fleet.keep_quiet())  # a greedy request beside others changes what those draw
    yield engine
    engine.close()


def test_a_seed_draws_what_it_draws_on_one_rank(two_ranks, published, model):
    assert two_ranks._fleet.servers[0].info.tp == 2
    assert_holds(two_ranks, model)
    expected = published.generate([REQUEST])[0]
    assert [sample.token_ids for sample in two_ranks.generate([REQUEST])[0]] == [it.token_ids for it in expected]


def test_weights_from_files_reach_both_ranks(two_ranks, model):
    two_ranks.update_weights(perturbed(model), 1)  # checksums of both ranks are compared
    two_ranks.update_weights(weights_of(model), 2)
    assert_holds(two_ranks, model)


@pytest.mark.parametrize("mode", TRANSFERS)
def test_live_weights_reach_both_ranks(two_ranks, recipe_dir, model, mode):
    live = attached(two_ranks, recipe_dir / "model", TRANSFERS[mode](bucket_bytes=10**12, timeout_s=LIMIT_S))
    try:
        live.update_weights(perturbed(model), 1)
        live.update_weights(weights_of(model), 2)
        assert_holds(live, model)
    finally:
        live.close()
