import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.train.megatron.conftest import FAMILIES, make_batches, weighted_loss
from unirl.errors import UserError
from unirl.train.megatron import model as model_module
from unirl.train.megatron.hf_folder import SINGLE, resolve_folder
from unirl.train.megatron.model import padded_vocab_size
from unirl.train.megatron.weights import export_hf, global_name, global_parameters


def stored_names(folder):
    names = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.mark.parametrize("family", FAMILIES)
def test_export_is_what_was_imported(make_folder, make_actor, family):
    folder, reference = make_folder(family)
    actor = make_actor(folder)
    exported = list(actor.export_weights())
    assert actor.weight_shapes() == [(name, tuple(tensor.shape)) for name, tensor in exported]
    expected = load_file(folder / SINGLE)
    assert len(exported) == len(expected)
    assert {name for name, _ in exported} == set(expected)
    assert ("lm_head.weight" in expected) == (not reference.config.tie_word_embeddings)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in exported)


def test_exported_weights_are_copies(make_folder, make_actor):
    folder, _ = make_folder()
    actor = make_actor(folder, lr=0.1)
    before = dict(actor.export_weights())
    kept = {name: tensor.clone() for name, tensor in before.items()}
    actor.forward_backward(make_batches(), weighted_loss)
    actor.optimizer_step()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in before.items())
    assert not any(torch.equal(tensor, kept[name]) for name, tensor in actor.export_weights())


@pytest.mark.parametrize("family", FAMILIES)
def test_exported_folder_loads_in_transformers(tmp_path, make_folder, make_actor, family):
    folder, _ = make_folder(family)
    (folder / "tokenizer.json").write_text("{}")
    actor = make_actor(folder, lr=0.05)
    actor.forward_backward(make_batches(), weighted_loss)
    actor.optimizer_step()
    actor.export_hf(tmp_path / "out")
    assert stored_names(tmp_path / "out") == stored_names(folder)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out.part").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    (batch,) = make_batches()
    with torch.no_grad():
        tokens = batch.tokens[: int(batch.tree_cu_seqlens[1])]
        expected = actor.model(make_batches()[0])[: int(batch.loss_cu_seqlens[1])]
        found = loaded(tokens[None]).logits[0][batch.predict_positions[: expected.shape[0]]]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    again = dict(make_actor(tmp_path / "out").export_weights())
    assert all(torch.equal(tensor, again[name]) for name, tensor in actor.export_weights())


def test_config_of_an_export_names_the_dtype_of_its_weights(tmp_path, make_folder, make_actor):
    folder, _ = make_folder()
    make_actor(folder, dtype="bfloat16").export_hf(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert next(AutoModelForCausalLM.from_pretrained(tmp_path / "out").parameters()).dtype == torch.bfloat16


def test_export_to_a_folder_that_exists_is_refused(tmp_path, make_folder, make_actor):
    actor = make_actor(make_folder()[0])
    with pytest.raises(FileExistsError, match="exists"):
        actor.export_hf(tmp_path)


def test_shards_are_written_and_read(tmp_path, make_folder, make_actor):
    folder, _ = make_folder("llama3-untied")
    actor = make_actor(folder)
    export_hf(actor.chunks, folder, tmp_path / "sharded", max_shard_bytes=20_000)
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
    again = dict(make_actor(tmp_path / "sharded").export_weights())
    assert all(torch.equal(tensor, again[name]) for name, tensor in actor.export_weights())


def test_a_padded_vocabulary_is_trimmed_and_never_drawn(make_folder, make_actor, monkeypatch):
    folder, _ = make_folder("qwen3-untied")
    plain = make_actor(folder)
    monkeypatch.setattr(model_module, "padded_vocab_size", lambda vocab_size, tp: 128)
    padded = make_actor(folder)
    with torch.no_grad():
        padded.model.output_layer.weight[padded.vocab_size :] = 50.0
    assert padded.model.output_layer.weight.shape[0] == 128
    batches = make_batches()
    torch.testing.assert_close(padded.log_probs(batches), plain.log_probs(batches))
    for actor in (plain, padded):
        actor.forward_backward(batches, weighted_loss)
        actor.optimizer_step()
    expected = dict(plain.export_weights())
    for name, tensor in padded.export_weights():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"),
    [(151_936, 1, 151_936), (151_936, 2, 152_064), (151_936, 4, 152_064), (151_936, 8, 152_576), (50_257, 2, 50_432)],
)
def test_padding_of_the_vocabulary(vocab, tp, padded):
    assert padded_vocab_size(vocab, tp) == padded


def rewrite(folder, change):
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def test_missing_and_unknown_names_are_errors(make_folder, make_actor):
    folder, _ = make_folder()
    rewrite(folder, lambda tensors: tensors.update(extra=tensors.pop("model.layers.1.mlp.up_proj.weight")))
    with pytest.raises(UserError, match=r"missing: \['model\.layers\.1\.mlp\.up_proj\.weight'\].*\['extra'\]"):
        make_actor(folder)


def test_another_shape_is_an_error(make_folder, make_actor):
    folder, _ = make_folder()
    rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight.*\(31,\).*\(32,\)"):
        make_actor(folder)


def test_a_second_copy_of_a_tied_head_is_accepted(make_folder, make_actor):
    folder, _ = make_folder()
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    assert "lm_head.weight" not in dict(make_actor(folder).export_weights())


def test_a_file_that_is_cut_off_is_an_error(make_folder, make_actor):
    folder, _ = make_folder()
    os.truncate(folder / SINGLE, 1000)
    with pytest.raises(UserError, match=r"the weights cannot be read: .*; fetch or export the model again"):
        make_actor(folder)


def test_a_folder_without_safetensors_is_an_error(make_folder, make_actor):
    folder, _ = make_folder()
    (folder / SINGLE).unlink()
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        make_actor(folder)


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"model\.path: there is no folder"):
        resolve_folder(str(tmp_path / "nowhere"))


def test_names_of_grouped_experts(make_folder, make_actor):
    model = make_actor(make_folder("qwen3-moe")[0]).model
    assert global_name(model, "decoder.layers.1.mlp.experts.linear_fc2.weight5") in global_parameters([model])
