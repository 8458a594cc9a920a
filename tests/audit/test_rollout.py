"""`python -m unirl.audit rollout` with the native engine; that with SGLang is with the tests of its server."""

import pytest

from tests.trainer.conftest import REPLAY, recipe_dir  # noqa: F401  (fixture)
from unirl.audit.__main__ import main


@pytest.mark.parametrize("narrowed", [(), REPLAY], ids=["whole", "narrowed"])
def test_engine_and_actor_agree(recipe_dir, tmp_path, capsys, narrowed):  # noqa: F811
    options = ["rollout", "--config-name=tiny", f"--config-dir={recipe_dir}", f"run_dir={tmp_path}", *narrowed]
    assert main(options) == 0
    printed = capsys.readouterr().out
    assert "10 syncs of the same weights" in printed
    assert "19 passed, 0 failed" in printed
    assert main([*options, "--mean-limit=1e-12"]) == 1
    assert "FAIL" in capsys.readouterr().out


def test_a_recipe_that_does_not_exist_is_said(capsys):
    assert main(["rollout", "--config-name=none"]) == 2
    assert "--config-name=none: no such recipe" in capsys.readouterr().err
