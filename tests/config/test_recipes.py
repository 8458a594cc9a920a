"""Where recipes are found, how they build on each other, how presets and overrides act; every shipped recipe."""

from pathlib import Path

import pytest

import unirl
from unirl.config import compose, load_config, to_yaml
from unirl.config.recipes import config_folders, find_presets, find_recipes
from unirl.errors import ConfigError, UserError

EXAMPLES = Path(unirl.__file__).parent.parent / "examples"


def all_presets() -> list[tuple[str, str]]:
    return [(group, name) for group, names in find_presets([EXAMPLES]).items() for name in names]


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """What the shipped recipes take from the environment."""
    for name, file in (("DATA_PATH", "train.jsonl"), ("EVAL_DATA_PATH", "aime_eval.jsonl")):
        (tmp_path / file).touch()
        monkeypatch.setenv(name, str(tmp_path / file))


@pytest.mark.parametrize("name", find_recipes([EXAMPLES]))
def test_every_shipped_recipe_composes(name, environment):
    config = compose(name, config_dirs=[EXAMPLES], purpose="plan")
    assert config.run_dir


@pytest.mark.parametrize("name", find_recipes([EXAMPLES]))
def test_every_shipped_recipe_says_what_it_is(name):
    assert len(find_recipes([EXAMPLES])[name].description) > 20


@pytest.mark.parametrize(("group", "name"), all_presets())
def test_every_shipped_preset_composes(group, name, environment):
    recipe = "ar/qwen3_drpo_4b_base_dapo_sglang"
    compose(recipe, [f"{group}={name}"], [EXAMPLES], purpose="plan")


def test_the_4b_recipe_is_what_it_says(environment, tmp_path, monkeypatch):
    monkeypatch.delenv("EVAL_DATA_PATH")
    config = load_config(["--config-name=ar/qwen3_drpo_4b_base_dapo_sglang", "num_devices=64", "--dry-run"])
    assert config.model.path == "Qwen/Qwen3-4B-Base"
    assert config.eval.path == str(tmp_path / "aime_eval.jsonl")
    assert (config.batch_size, config.sampling.num_samples, config.num_iterations) == (64, 8, 800)
    assert (config.algorithm.loss, config.algorithm.drpo_epsilon, config.algorithm.horizon) == ("drpo", 12.5, 8192)
    assert config.algorithm.loss_agg_mode == "seq-mean-token-sum-norm"
    assert (config.algorithm.adv_norm.mean_level, config.algorithm.adv_norm.std_level) == ("group", None)
    assert (config.optimizer.lr, config.optimizer.betas, config.optimizer.weight_decay) == (1e-6, [0.9, 0.999], 0.01)
    assert (config.eval.every, config.eval.num_samples) == (10, 16)


def test_the_grpo_recipe_differs_in_its_loss_alone(environment):
    drpo, grpo = (compose(f"ar/qwen3_{loss}_4b_base_dapo_sglang", purpose="plan") for loss in ("drpo", "grpo"))
    assert (grpo.algorithm.loss, grpo.algorithm.eps_clip, grpo.algorithm.eps_clip_higher) == ("ppo", 0.2, 0.28)
    assert grpo.data == drpo.data
    assert grpo.optimizer == drpo.optimizer


def test_a_preset_lies_between_schema_and_recipe(folder):
    (folder / "with_preset.yaml").write_text(
        "defaults: [small, {/algorithm: one}, _self_]\nalgorithm: {entropy_coef: 0.5}\n"
    )
    config = compose("with_preset", [], [folder])
    assert (config.algorithm.loss, config.algorithm.drpo_epsilon, config.algorithm.entropy_coef) == ("drpo", 3, 0.5)
    config = compose("with_preset", ["algorithm=two", "algorithm.eps_clip=0.3"], [folder])
    assert (config.algorithm.loss, config.algorithm.eps_clip, config.algorithm.drpo_epsilon) == ("ppo", 0.3, 12.5)


def test_a_preset_is_added_to_a_recipe_without_one(folder):
    assert compose("small", ["+algorithm=two"], [folder]).algorithm.loss == "ppo"


def test_plus_sets_a_key_that_the_schema_has(small):
    assert small("+seed=5", "+algorithm.reward_norm.mean_level=group", purpose="plan").seed == 5


def test_the_first_folder_wins(folder, tmp_path, monkeypatch):
    other = tmp_path / "examples"
    other.mkdir()
    (other / "small.yaml").write_text("# Another\nseed: 1\n")
    (other / "local.yaml").write_text("defaults: [small]\nseed: 9\n")
    monkeypatch.chdir(tmp_path)
    recipes = find_recipes(config_folders([folder]))
    assert recipes["small"].description == "A small recipe for tests"
    assert compose("local", [], [folder]).seed == 9
    assert "ar/qwen3_drpo_4b_base_dapo_sglang" in recipes, "recipes of the checkout are found from elsewhere"


def test_folders_may_have_any_name(tmp_path, folder):
    odd = tmp_path / "my configs, 50% #1"
    odd.mkdir()
    (odd / "mine.yaml").write_text("defaults: [small]\nseed: 4\n")
    assert compose("mine", [], [odd, folder]).seed == 4


def test_a_file_beside_another(small):
    assert small("eval.path='${sibling:${data.path},prompts.jsonl}'").eval.path == small().data.path
    assert small("data.path=null", "eval.path='${sibling:${data.path},x}'", purpose="print").eval.path is None


def test_to_yaml_is_a_recipe_of_the_same_config(folder, small):
    config = small("data.prompt_template='cost: \\${x} {prompt}'", "optimizer.lr=3e-5")
    assert config.data.prompt_template == "cost: ${x} {prompt}"
    (folder / "again.yaml").write_text(to_yaml(config))
    assert compose("again", [], [folder]) == config


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--config-name=smal"], "--config-name=smal: no such recipe; the nearest is small"),
        (["--config-name=small", "--seed=1"], "config keys are given without dashes: seed=..."),
        (["--config-nam=small"], "unknown option '--config-nam=small'"),
        (["seed=1"], "--config-name is not given; recipes found: "),
        (["--config-name=small", "--cfg=jobs"], "invalid choice: 'jobs'"),
        (["--config-name=small", "--config-dir=no/where"], "--config-dir=no/where: no such folder"),
        (["--config-name=small", "algorithm=tow"], "algorithm=tow: no such preset; the nearest is two (of "),
        (["--config-name=small", "algorithm=5"], "algorithm=5: expected a preset ("),
        (["--config-name=small", "algorithm=two"], "to your default list use +algorithm=two"),
        (["--config-name=small", "seed"], "seed: is no override: config keys are given as key=value"),
        (["--config-name=small", "seed=1,2"], "seed=1,2: gives several values"),
        (["--config-name=small", "run_dir=a=b"], "is quoted: 'run_dir=\"a=b\"'"),
        (["--config-name=small", "hydra.verbose=true"], "hydra.verbose=true: unknown key"),
        (["--config-name=broken_yaml"], 'broken_yaml.yaml", line 1'),
        (["--config-name=broken_list"], "broken_list"),
        (
            ["--config-name=broken_preset"],
            "defaults name 'algorithm/tow', which does not exist; the nearest is two",
        ),
        (["--config-name=broken_base"], "its defaults name 'smal', which does not exist"),
        (["--config-name=broken_text"], "broken_text"),
        (["--config-name=broken_bytes"], "broken_bytes"),
    ],
)
def test_each_place_for_a_typo(folder, argv, message):
    (folder / "broken_yaml.yaml").write_text("a: [1")
    (folder / "broken_list.yaml").write_text("- 1\n- 2\n")
    (folder / "broken_preset.yaml").write_text("defaults: [small, {/algorithm: tow}]\n")
    (folder / "broken_base.yaml").write_text("defaults: [smal]\n")
    (folder / "broken_text.yaml").write_text("run_dir: ${oc.env:HOME\n")
    (folder / "broken_bytes.yaml").write_bytes(b"run_dir: \xff\n")
    with pytest.raises(UserError) as caught:
        load_config([f"--config-dir={folder}", *argv])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) or isinstance(caught.value, ConfigError)
