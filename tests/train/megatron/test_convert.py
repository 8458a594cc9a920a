import json
import pickle
import resource
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.train.megatron.conftest import make_batches, weighted_loss
from unirl import convert
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.errors import UserError
from unirl.train.checkpoint import CheckpointStore
from unirl.train.manifest import find_damage, read_manifest, sum_of_file, write_manifest
from unirl.train.megatron.actor import MegatronActor
from unirl.train.megatron.hf_folder import SINGLE


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
    manifest = read_manifest(file.parents[1])
    write_manifest(file.parents[1], manifest | {"actor/.metadata": sum_of_file(file)})
    assert_error(capsys, run(run_dir, tmp_path / "out"), "lacks decoder.final_layernorm.weight")
    assert not list(tmp_path.glob("out*"))


def test_a_checkpoint_outside_a_run_needs_its_model_named(tmp_path, trained, capsys):
    run_dir, _ = trained()
    (run_dir / "config.yaml").unlink()
    assert_error(capsys, run(run_dir, tmp_path / "out"), "config.yaml", "--model")


def test_what_is_neither_model_nor_checkpoint_is_refused(tmp_path, capsys):
    assert_error(capsys, run(tmp_path, tmp_path / "out"), "expected a Hugging Face folder")


def test_a_damaged_checkpoint_is_refused(tmp_path, trained, capsys):
    run_dir, _ = trained()
    file = run_dir / "checkpoints" / "iteration_00000002" / "actor" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert_error(capsys, run(run_dir, tmp_path / "out"), "is damaged: actor/__0_0.distcp", "checksum")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama3-untied", "float32"), ("qwen2-tied", "bfloat16"), ("qwen3-moe", "float16")]
)
def test_folder_to_checkpoint_and_back_is_the_same_folder(tmp_path, make_folder, family, dtype):
    folder, _ = make_folder(family)
    save_file({name: t.to(convert.DTYPES[dtype]) for name, t in load_file(folder / SINGLE).items()}, folder / SINGLE)
    assert run(folder, tmp_path / "model", "--to", "checkpoint", "--max-shard-gb", 2**-16) == 0
    assert len(list((tmp_path / "model" / "actor").glob("__*.distcp"))) > 2
    assert run(tmp_path / "model", tmp_path / "out", "--model", folder) == 0
    stored, found = load_file(folder / SINGLE), load_file(tmp_path / "out" / SINGLE)
    assert found.keys() == stored.keys()
    assert all(
        tensor.dtype == convert.DTYPES[dtype] and torch.equal(tensor, stored[name]) for name, tensor in found.items()
    )


def test_folder_of_mixed_dtypes_keeps_its_values(tmp_path, make_folder):
    folder, _ = make_folder()
    stored = load_file(folder / SINGLE)
    stored = {name: tensor.bfloat16() if tensor.dim() == 2 else tensor for name, tensor in stored.items()}
    save_file(stored, folder / SINGLE)
    assert run(folder, tmp_path / "model", "--to", "checkpoint") == 0
    assert run(tmp_path / "model", tmp_path / "out", "--model", folder) == 0
    found = load_file(tmp_path / "out" / SINGLE)
    assert all(torch.equal(found[name], tensor.float()) for name, tensor in stored.items())


def load_into_trainers(folders: dict[str, Path], root: Path) -> list[str]:
    """What is not as it should be of the trainers that have loaded the checkpoints below `root`."""
    return [problem for family, other in folders.items() for problem in load_into_trainer(other, root / family, family)]


def load_into_trainer(other: Path, checkpoint: Path, family: str) -> list[str]:
    """other: a folder of the same model with other weights, which the trainer starts from."""
    actor = MegatronActor(
        ModelConfig(path=str(other)),
        parallel=ParallelConfig(tp=2, sequence_parallel=True),
        optimizer=OptimizerConfig(lr=0.01),
        stack=StackConfig(),
        temperature=1.0,
        total_steps=4,
        seed=0,
    )
    try:
        batches = make_batches(**asdict(actor.shape))
        actor.forward_backward(batches, weighted_loss)
        actor.optimizer_step()  # there are moments to forget
        actor.load(checkpoint / "actor")
        expected = load_file(checkpoint.with_name(f"{family}-source") / SINGLE)
        found = dict(actor.export_weights())
        problems = [name for name in expected if not torch.equal(found[name], expected[name])]
        problems += [f"{family}: {actor.optimizer.steps} steps"] if actor.optimizer.steps else []
        actor.forward_backward(batches, weighted_loss)
        actor.optimizer_step()
        return problems + ([] if actor.optimizer.steps == 1 else [f"{family}: no first step"])
    finally:
        actor.close()


def test_trainers_of_two_ranks_start_from_the_weights(tmp_path, make_folder):
    others = {}
    for family in ("qwen3-tied", "qwen3-moe"):
        make_folder(family)[0].rename(tmp_path / f"{family}-source")
        others[family] = make_folder(family, seed=1)[0]
        assert run(tmp_path / f"{family}-source", tmp_path / family, "--to", "checkpoint") == 0
    assert run_ranks(load_into_trainers, 2, others, tmp_path, timeout_s=120) == [[], []]


def test_a_checkpoint_made_of_a_folder_has_a_manifest_and_no_run(tmp_path, make_folder, make_actor):
    folder, _ = make_folder()
    out = tmp_path / "checkpoints" / "iteration_00000001"
    assert run(folder, out, "--to", "checkpoint") == 0
    files = read_manifest(out)
    assert files.keys() == {str(path.relative_to(out)) for path in (out / "actor").iterdir()}
    assert find_damage(out, files) is None
    store = CheckpointStore(tmp_path / "checkpoints", keep=1)
    with pytest.raises(UserError, match=r"no state of a run.*model\.path"):
        store.load_newest({"actor": make_actor(folder)}, print)
    assert store.iterations() == [1], "it is whole: not set aside as a damaged one"


def change_weights(folder: Path, change) -> None:
    weights = load_file(folder / SINGLE)
    change(weights)
    save_file(weights, folder / SINGLE)


def cut_off(folder: Path) -> None:
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])


def change_config(folder: Path, **fields) -> None:
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | fields))


@pytest.mark.parametrize("to", ["hf", "checkpoint"])
@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (cut_off, ["the weights cannot be read"]),
        (lambda f: change_weights(f, lambda w: w.pop("model.norm.weight")), ["missing: ['model.norm.weight']"]),
        (
            lambda f: change_weights(f, lambda w: w.update({"model.norm.weight": torch.ones(31)})),
            ["model.norm.weight has the shape (31,), config.json implies (32,)"],
        ),
        (lambda f: change_config(f, model_type="gpt2"), ["gpt2"]),
    ],
    ids=["cut off", "missing", "shape", "model"],
)
def test_a_folder_that_is_damaged_or_unsupported_is_refused(tmp_path, make_folder, capsys, to, damage, parts):
    folder, _ = make_folder()
    damage(folder)
    assert_error(capsys, run(folder, tmp_path / "out", "--to", to), str(folder), *parts)
    assert not list(tmp_path.glob("out*"))


def test_a_dtype_that_float32_does_not_hold_is_refused(tmp_path, make_folder, capsys):
    folder, _ = make_folder()
    change_weights(folder, lambda w: w.update({"model.norm.weight": w["model.norm.weight"].double()}))
    assert_error(capsys, run(folder, tmp_path / "out", "--to", "checkpoint"), "torch.float64", "float32, bfloat16")
    assert not list(tmp_path.glob("out*"))


def test_what_does_not_fit_the_direction_is_refused(tmp_path, trained, make_folder, capsys):
    run_dir, _ = trained()
    assert_error(capsys, run(run_dir, tmp_path / "out", "--to", "checkpoint"), str(run_dir), "no config.json")
    folder, _ = make_folder()
    assert_error(capsys, run(folder, tmp_path / "out", "--model", folder), "--model", "leave it out")
    (tmp_path / "out").mkdir()
    assert_error(capsys, run(folder, tmp_path / "out", "--to", "checkpoint"), "out exists")


@pytest.mark.parametrize("to", ["hf", "checkpoint"])
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, make_folder, capsys, to):
    folder, _ = make_folder()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # stands for the full disk: the same write fails
    try:
        code = run(folder, tmp_path / "out", "--to", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert_error(capsys, code, f"{tmp_path / 'out'} cannot be written", "File too large")
    assert not list(tmp_path.glob("out*"))
