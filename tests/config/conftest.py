import pytest

from unirl.config import TrainConfig, compose

RECIPE = """\
# A small recipe for tests
batch_size: 4
num_iterations: 3
run_dir: runs/small
model: {path: owner/model}
data: {path: %s}
sampling: {max_new_tokens: 64}
"""


@pytest.fixture
def folder(tmp_path):
    """A config folder that holds the recipe `small`, valid for a run, and two presets of `algorithm`."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.touch()
    configs = tmp_path / "configs"
    (configs / "algorithm").mkdir(parents=True)
    (configs / "small.yaml").write_text(RECIPE % prompts)
    (configs / "algorithm" / "one.yaml").write_text("loss: drpo\ndrpo_epsilon: 3\n")
    (configs / "algorithm" / "two.yaml").write_text("loss: ppo\neps_clip: 0.1\n")
    return configs


@pytest.fixture
def small(folder):
    """`small(*overrides, purpose=...)` composes the small recipe."""

    def compose_small(*overrides: str, purpose: str = "run") -> TrainConfig:
        return compose("small", overrides, [folder], purpose)

    return compose_small
