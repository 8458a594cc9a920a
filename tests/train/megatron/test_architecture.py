import json
import re

import pytest

from unirl.config.schema import ParallelConfig
from unirl.errors import UserError
from unirl.train.megatron.architecture import check_layout, read_architecture


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("qwen3-tied", "model_type", "gemma"),
        ("qwen3-tied", "hidden_act", "gelu"),
        ("qwen3-tied", "attention_dropout", 0.1),
        ("qwen3-tied", "attention_bias", True),
        ("qwen2-tied", "use_sliding_window", True),
        ("qwen3-tied", "layer_types", ["full_attention", "sliding_attention"]),
        ("llama3-untied", "mlp_bias", True),
        ("llama3-untied", "quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_what_training_would_not_reproduce_is_refused_by_name(make_folder, family, field, value):
    folder, _ = make_folder(family)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=rf"config\.json: {field} ('gemma' )?is"):
        read_architecture(folder)


def test_other_rope_is_refused_by_name(make_folder):
    folder, _ = make_folder()
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"rope_parameters\.rope_type is 'yarn'"):
        read_architecture(folder)


def test_config_in_the_older_form(make_folder):
    """transformers before 5 wrote rope_theta and rope_scaling on the top level."""
    folder, _ = make_folder("llama3-untied")
    expected = read_architecture(folder)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    (folder / "config.json").write_text(json.dumps(config))
    assert read_architecture(folder) == expected


@pytest.mark.parametrize("content", ["", "{", '{"hidden_size": 32}'])
def test_a_config_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json cannot be read as the config of a model: "):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    ("family", "parallel", "message"),
    [
        ("llama-tied-9-heads", {"tp": 2}, "has: 9 attention heads, 3 key-value heads, 48 columns of the MLP;"),
        ("llama-tied-9-heads", {"tp": 2}, "sizes that fit: 1, 3"),
        ("qwen3-tied", {"pp": 3}, "parallel.pp=3 does not divide what the model has: 2 layers; sizes that fit: 1, 2"),
        ("qwen3-tied", {"ep": 2}, "parallel.ep=2: the model has no experts"),
        (
            "qwen3-moe",
            {"ep": 3},
            "parallel.ep=3 does not divide what the model has: 8 experts; sizes that fit: 1, 2, 4, 8",
        ),
        ("qwen3-moe", {"tp": 2}, "parallel.sequence_parallel=true"),
    ],
)
def test_sizes_that_do_not_split_the_model_are_refused(make_folder, family, parallel, message):
    architecture = read_architecture(make_folder(family)[0])
    with pytest.raises(UserError, match=re.escape(message)):
        check_layout(architecture, ParallelConfig(**parallel))


@pytest.mark.parametrize(("field", "value"), [("decoder_sparse_step", 2), ("mlp_only_layers", [0])])
def test_experts_in_some_layers_only_are_refused(make_folder, field, value):
    folder, _ = make_folder("qwen3-moe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=rf"config\.json: {field} is"):
        read_architecture(folder)


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3-moe"])
def test_a_token_costs_the_experts_that_are_picked_for_it(make_folder, family):
    folder, _ = make_folder(family)
    config = json.loads((folder / "config.json").read_text())
    picked = config["intermediate_size"]
    if family == "qwen3-moe":
        picked = config["num_experts_per_tok"] * config["moe_intermediate_size"]
        assert picked != config["intermediate_size"]
    assert read_architecture(folder).active_ffn_size == picked
