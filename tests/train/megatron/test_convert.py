import json
import pickle

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.train.megatron.conftest import make_batches, weighted_loss
from unirl import convert
from unirl.train.checkpoint import CheckpointStore


def run(*arguments) -> int:
    return convert.main([str(argument) for argument in arguments])


def assert_error(capsys, code: int, *parts: str) -> None:
    assert code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert all(part in error for part in parts), error


@pytest.fixture
def trained(tmp_path, make_folder, make_actor):
    """(run directory with two checkpoints, the weights of the second)"""

    def make(family: str = "llama3-untied"):
        folder, _ = make_folder(family)
        actor = make_actor(folder, lr=0.01)
        run_dir = tmp_path / "run"
        store = CheckpointStore(run_dir / "checkpoints", keep=2)
        for iteration in (1, 2):
            actor.forward_backward(make_batches(), weighted_loss)
            actor.optimizer_step()
            store.save(iteration, {}, {"actor": actor})
        (run_dir / "config.yaml").write_text(f"model:\n  path: {folder}\n")
        return run_dir, dict(actor.export_weights())

    return make


@pytest.mark.parametrize("family", ["qwen2-tied", "qwen3-moe"])
def test_checkpoint_becomes_a_folder_of_the_live_weights(tmp_path, trained, family):
    run_dir, weights = trained(family)
    assert run(run_dir / "checkpoints" / "iteration_00000002", tmp_path / "out") == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items())
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_a_run_directory_stands_for_its_newest_checkpoint(tmp_path, trained):
    run_dir, weights = trained()
    assert run(run_dir, tmp_path / "out") == 0
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"], weights["model.norm.weight"]
    )


def test_folder_in_another_dtype_and_smaller_files(tmp_path, make_folder):
    folder, reference = make_folder()
    (folder / "tokenizer.json").write_text("{}")
    assert run(folder, tmp_path / "out", "--dtype", "bfloat16", "--max-shard-gb", 2**-16) == 0
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 2
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(found[name], tensor.bfloat16())


def test_a_folder_that_exists_is_never_written_to(tmp_path, make_folder, capsys):
    (tmp_path / "out").mkdir()
    assert_error(capsys, run(make_folder()[0], tmp_path / "out"), "out exists")
    assert not list((tmp_path / "out").iterdir())


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_left(tmp_path, trained, make_folder, capsys):
    run_dir, _ = trained("qwen2-tied")
    other, _ = make_folder("llama3-untied")
    code = run(run_dir, tmp_path / "out", "--model", other)
    assert_error(capsys, code, "has a weight decoder.layers.0.self_attention.linear_qkv.bias", "--model")
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path, trained, capsys):
    run_dir, _ = trained()
    file = run_dir / "checkpoints" / "iteration_00000002" / "actor" / ".metadata"
    index = pickle.loads(file.read_bytes())
    del index.state_dict_metadata["weight.decoder.final_layernorm.weight"]
    file.write_bytes(pickle.dumps(index))
    assert_error(capsys, run(run_dir, tmp_path / "out"), "lacks decoder.final_layernorm.weight")
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_outside_a_run_needs_its_model_named(tmp_path, trained, capsys):
    run_dir, _ = trained()
    (run_dir / "config.yaml").unlink()
    assert_error(capsys, run(run_dir, tmp_path / "out"), "config.yaml", "--model")


def test_what_is_neither_model_nor_checkpoint_is_refused(tmp_path, capsys):
    assert_error(capsys, run(tmp_path, tmp_path / "out"), "expected a Hugging Face folder")
