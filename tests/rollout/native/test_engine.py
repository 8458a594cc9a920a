"""The native engine against transformers on real folders, and its promise that a sample depends on its seed alone."""

import json
import random
import shutil
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rollout.conftest import MAX_POSITIONS, VOCAB_SIZE, build_model, reference_log_probs
from unirl.rollout.native import NativeRolloutEngine
from unirl.rollout.native.engine import _plan_batches
from unirl.types import GenerationRequest, SampleStatus, SamplingParams

FAMILIES = ("qwen3", "qwen2", "llama", "llama3")
STOPS = tuple(range(5))


def make_requests(params: SamplingParams, lengths=(3, 41, 17, 1, 17, 8), num_samples=5) -> list[GenerationRequest]:
    rng = random.Random(0)
    return [
        GenerationRequest(
            prompt_ids=tuple(rng.randrange(VOCAB_SIZE) for _ in range(length)),
            params=params,
            seeds=tuple(1000 * number + sample for sample in range(num_samples)),
        )
        for number, length in enumerate(lengths)
    ]


def assert_same(found, expected):
    assert [len(group) for group in found] == [len(group) for group in expected]
    for one, other in zip(chain.from_iterable(found), chain.from_iterable(expected), strict=True):
        assert one.token_ids == other.token_ids
        assert one.status == other.status
        assert (one.support is None) == (other.support is None)
        assert list(map(set, one.support or ())) == list(map(set, other.support or ()))
        torch.testing.assert_close(torch.tensor(one.log_probs), torch.tensor(other.log_probs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3, 0.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(models, family, temperature):
    model, folder = models[family]
    requests = make_requests(SamplingParams(40, temperature=temperature, stop_token_ids=STOPS), num_samples=2)
    engine = NativeRolloutEngine(folder, max_batch_size=64)
    for request, group in zip(requests, engine.generate(requests), strict=True):
        for completion in group:
            expected = reference_log_probs(model, request.prompt_ids, completion.token_ids, temperature or 1.0)
            torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_is_that_of_transformers(models, family):
    model, folder = models[family]
    request = make_requests(SamplingParams(30, temperature=0.0), lengths=[12], num_samples=1)[0]
    expected = model.generate(torch.tensor([request.prompt_ids]), do_sample=False, max_new_tokens=30, pad_token_id=0)
    found = NativeRolloutEngine(folder, max_batch_size=4).generate([request])[0][0]
    assert list(found.token_ids) == expected[0, 12:].tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_supports_are_those_of_transformers(models, temperature):
    model, folder = models["qwen3"]
    params = SamplingParams(40, temperature, top_p=0.4, top_k=12, stop_token_ids=STOPS, return_support=True)
    requests, sizes = make_requests(params, num_samples=1), set()
    groups = NativeRolloutEngine(folder, max_batch_size=4).generate(requests)
    for request, (sample,) in zip(requests, groups, strict=True):
        ids = torch.tensor([[*request.prompt_ids, *sample.token_ids]])
        with torch.no_grad():
            rows = (model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
        for row, token, logp, support in zip(rows, sample.token_ids, sample.log_probs, sample.support, strict=True):
            probs, order = row.exp().sort(descending=True)
            kept = order[:12][(probs.cumsum(0) - probs)[:12] < 0.4]
            assert set(support) == set(kept.tolist())
            assert logp == pytest.approx((row[token] - row[kept].logsumexp(0)).item(), abs=1e-5)
            sizes.add(len(support))
    assert len(sizes) > 5


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 12}, {"top_p": 0.8}, {"top_k": 12, "top_p": 0.8, "return_support": True}]
)
def test_a_sample_depends_on_its_seed_alone(models, filters):
    folder = models["qwen3"][1]
    requests = make_requests(SamplingParams(60, stop_token_ids=STOPS, **filters))
    together = NativeRolloutEngine(folder, max_batch_size=64).generate(requests)
    engine = NativeRolloutEngine(folder, max_batch_size=64)
    assert_same([engine.generate([request])[0] for request in requests], together)
    assert_same(engine.generate(requests[::-1])[::-1], together)
    for size in (1, 2, 7):
        assert_same(NativeRolloutEngine(folder, max_batch_size=size).generate(requests), together)
    lengths = {len(completion.token_ids) for group in together for completion in group}
    assert len(lengths) > 5, "rows must end at different times for this test to mean anything"


def test_samples_of_one_prompt_differ_and_equal_seeds_agree(engine):
    params = SamplingParams(20)
    prompt = tuple(range(10))
    group = engine.generate([GenerationRequest(prompt, params, (7, 8, 7, 2**80))])[0]
    assert group[0].token_ids == group[2].token_ids
    assert len({completion.token_ids for completion in group}) == 3


def test_long_generation_grows_the_cache(models, monkeypatch):
    monkeypatch.setattr("unirl.rollout.native.cache._SLOTS_PER_BLOCK", 7)
    model, folder = models["qwen3"]
    requests = make_requests(SamplingParams(100, stop_token_ids=(0,)))
    engine = NativeRolloutEngine(folder, max_batch_size=64)
    for request, group in zip(requests, engine.generate(requests), strict=True):
        expected = reference_log_probs(model, request.prompt_ids, group[0].token_ids)
        torch.testing.assert_close(torch.tensor(group[0].log_probs), expected, atol=1e-5, rtol=0)


def test_prompts_prefilled_in_several_passes(models, monkeypatch):
    requests = make_requests(SamplingParams(20))
    engine = NativeRolloutEngine(models["qwen3"][1], max_batch_size=64)
    at_once = engine.generate(requests)
    for budget in (1, 40, 60):
        monkeypatch.setattr("unirl.rollout.native.decode._PREFILL_TOKENS", budget)
        assert_same(engine.generate(requests), at_once)


def test_finish_reasons(engine):
    params = SamplingParams(25, stop_token_ids=STOPS)
    completions = list(chain.from_iterable(engine.generate(make_requests(params))))
    assert {completion.status for completion in completions} == {SampleStatus.COMPLETED, SampleStatus.TRUNCATED}
    for completion in completions:
        assert not set(completion.token_ids[:-1]) & set(STOPS)
        if completion.status == SampleStatus.COMPLETED:
            assert completion.token_ids[-1] in STOPS
        else:
            assert len(completion.token_ids) == 25
            assert completion.token_ids[-1] not in STOPS


def test_a_stop_token_at_the_limit_completes(engine):
    request = make_requests(SamplingParams(1, stop_token_ids=tuple(range(VOCAB_SIZE))))[0]
    assert engine.generate([request])[0][0].status == SampleStatus.COMPLETED


def test_generation_ends_with_the_positions_of_the_model(models):
    model, folder = models["qwen3"]
    requests = make_requests(SamplingParams(1000), lengths=[MAX_POSITIONS - 3, 4, MAX_POSITIONS - 1], num_samples=2)
    groups = NativeRolloutEngine(folder, max_batch_size=64).generate(requests)
    assert [len(group[0].token_ids) for group in groups] == [3, MAX_POSITIONS - 4, 1]
    assert all(completion.status == SampleStatus.TRUNCATED for group in groups for completion in group)
    expected = reference_log_probs(model, requests[1].prompt_ids, groups[1][0].token_ids)
    torch.testing.assert_close(torch.tensor(groups[1][0].log_probs), expected, atol=1e-5, rtol=0)


def test_requests_with_different_params_in_one_call(engine):
    sampled, greedy = (make_requests(SamplingParams(15, temperature=t), num_samples=2) for t in (1.0, 0.0))
    mixed = engine.generate([sampled[0], greedy[1], sampled[2], greedy[3]])
    alone = [engine.generate([request])[0] for request in (sampled[0], greedy[1], sampled[2], greedy[3])]
    assert_same(mixed, alone)


def test_nothing_to_do(engine):
    assert engine.generate([]) == []
    assert engine.generate([GenerationRequest((1, 2), SamplingParams(4), ())]) == [[]]


def test_progress_counts_finished_samples(models):
    requests = make_requests(SamplingParams(25, stop_token_ids=STOPS))
    seen = []
    NativeRolloutEngine(models["qwen3"][1], max_batch_size=8).generate(requests, seen.append)
    assert seen == sorted(seen)
    assert seen[0] < 8
    assert seen[-1] == sum(len(request.seeds) for request in requests)


def test_threads_are_restored(models):
    before = torch.get_num_threads()
    threads = []
    engine = NativeRolloutEngine(models["qwen3"][1], max_batch_size=8, num_threads=before + 1)
    engine.generate(make_requests(SamplingParams(1), [3]), lambda _: threads.append(torch.get_num_threads()))
    assert set(threads) == {before + 1}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": (1, VOCAB_SIZE)}, f"outside the vocabulary of {VOCAB_SIZE}"),
        ({"prompt_ids": (1, -1)}, "outside the vocabulary"),
        ({"prompt_ids": ()}, "0 tokens"),
        ({"prompt_ids": (1,) * MAX_POSITIONS}, f"max_position_embeddings = {MAX_POSITIONS}"),
        ({"seeds": (-1,)}, "seeds"),
        ({"params": SamplingParams(4, stop_token_ids=(VOCAB_SIZE,))}, "stop_token_ids"),
        ({"params": SamplingParams(0)}, "max_new_tokens"),
        ({"params": SamplingParams(4, temperature=-1.0)}, "temperature"),
        ({"params": SamplingParams(4, top_p=0.0)}, "top_p"),
        (
            {"params": SamplingParams(4, top_k=VOCAB_SIZE + 1, return_support=True)},
            f"top_k={VOCAB_SIZE + 1}, more than",
        ),
    ],
)
def test_bad_requests_are_refused(engine, change, message):
    fields = {"prompt_ids": (1, 2), "params": SamplingParams(4), "seeds": (0,), **change}
    good = GenerationRequest((1, 2), SamplingParams(4), (0,))
    with pytest.raises(ValueError, match=f"request 1: .*{message}"):
        engine.generate([good, GenerationRequest(**fields)])


def test_update_weights_changes_the_samples_to_those_of_the_new_model(models, engine):
    requests = make_requests(SamplingParams(20))
    before = engine.generate(requests)
    assert {v for c in before[0] for v in c.weight_versions} == {0}
    for version, seed in ((1, 5), (2, 6)):
        model = build_model("qwen3", seed)
        weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        engine.update_weights(weights.items(), version)
        assert engine.metrics()["sync/gb_per_s"] > 0
        after = engine.generate(requests)
        assert after[0][0].token_ids != before[0][0].token_ids
        assert {v for c in after[0] for v in c.weight_versions} == {version}
        expected = reference_log_probs(model, requests[0].prompt_ids, after[0][0].token_ids)
        torch.testing.assert_close(torch.tensor(after[0][0].log_probs), expected, atol=1e-5, rtol=0)
    assert engine.weight_version == 2


def test_an_update_that_does_not_fit_changes_nothing(models, engine):
    requests = make_requests(SamplingParams(20))
    before = engine.generate(requests)
    other = {n: t for n, t in build_model("qwen3", 5).state_dict().items() if n != "lm_head.weight"}
    some, norm = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    cases = [
        ({n: t for n, t in other.items() if n != some}, f"missing .1.: {some}"),
        ({**other, "lm_head.weight": other["model.embed_tokens.weight"]}, "not in the model .1.: lm_head.weight"),
        ({**other, norm: torch.zeros(47)}, rf"wrong shape .1.: {norm} \(47,\) instead of \(48,\)"),
    ]
    for weights, message in cases:
        with pytest.raises(ValueError, match=message):
            engine.update_weights(weights.items(), 1)
    with pytest.raises(ValueError, match=f"{norm} was given twice"):
        engine.update_weights([*other.items(), (norm, other[norm])], 1)
    assert engine.weight_version == 0
    assert_same(engine.generate(requests), before)


def test_broken_weights_are_an_error(models, engine):
    weights = {n: t.clone() for n, t in models["qwen3"][0].state_dict().items() if n != "lm_head.weight"}
    weights["model.norm.weight"][3] = float("nan")
    engine.update_weights(weights.items(), 1)
    with pytest.raises(FloatingPointError, match="weights are broken"):
        engine.generate(make_requests(SamplingParams(20)))


def test_close_twice_then_refuse(engine):
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate([])


def test_sharded_folder(models, tmp_path):
    model, folder = models["llama3"]
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    requests = make_requests(SamplingParams(20))
    assert_same(
        NativeRolloutEngine(tmp_path, max_batch_size=64).generate(requests),
        NativeRolloutEngine(folder, max_batch_size=64).generate(requests),
    )


def test_a_tied_model_may_store_its_head_as_an_equal_copy(models, tmp_path):
    folder = shutil.copytree(models["qwen3"][1], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    requests = make_requests(SamplingParams(20))
    assert_same(
        NativeRolloutEngine(folder, max_batch_size=64).generate(requests),
        NativeRolloutEngine(models["qwen3"][1], max_batch_size=64).generate(requests),
    )
    weights["lm_head.weight"] += 1
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        NativeRolloutEngine(folder, max_batch_size=64)


def test_weights_that_do_not_fit_the_config_are_refused(models, tmp_path):
    folder = shutil.copytree(models["qwen2"][1], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing .1.: lm_head.weight"):
        NativeRolloutEngine(folder, max_batch_size=64)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "mixtral"),
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("attention_bias", True),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("head_dim", None),
        ("vocab_size", None),
        ("quantization_config", {"quant_method": "fp8"}),
    ],
)
def test_unsupported_architectures_are_refused(models, tmp_path, field, value):
    folder = shutil.copytree(models["qwen3"][1], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    shown = "yarn" if field == "rope_parameters" else field
    with pytest.raises(ValueError, match=f"config.json: .*{shown}"):
        NativeRolloutEngine(folder, max_batch_size=8)


def test_older_config_fields_are_read(models, tmp_path):
    folder = shutil.copytree(models["llama3"][1], tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config.update(rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    (folder / "config.json").write_text(json.dumps(config))
    requests = make_requests(SamplingParams(20))
    assert_same(
        NativeRolloutEngine(folder, max_batch_size=64).generate(requests),
        NativeRolloutEngine(models["llama3"][1], max_batch_size=64).generate(requests),
    )


def test_folder_without_weights_is_refused(models, tmp_path):
    shutil.copy(models["qwen3"][1] / "config.json", tmp_path)
    with pytest.raises(FileNotFoundError, match="save the model as safetensors"):
        NativeRolloutEngine(tmp_path, max_batch_size=8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda(models, dtype):
    model, folder = models["qwen3"]
    engine = NativeRolloutEngine(folder, max_batch_size=8, device="cuda", dtype=dtype)
    requests = make_requests(SamplingParams(40, stop_token_ids=STOPS))
    for request, group in zip(requests, engine.generate(requests), strict=True):
        expected = reference_log_probs(model, request.prompt_ids, group[0].token_ids)
        tolerance = 1e-3 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(torch.tensor(group[0].log_probs), expected, atol=tolerance, rtol=0)


def test_samples_of_other_lengths_are_decoded_together(engine, monkeypatch):
    requests = [
        GenerationRequest((10, 11), SamplingParams(max_new_tokens=length), seeds=(length,)) for length in (3, 9, 1)
    ]
    alone = [engine.generate([request])[0][0] for request in requests]
    together = engine.generate(requests)
    assert [len(group[0].token_ids) for group in together] == [3, 9, 1]
    assert [group[0].token_ids for group in together] == [completion.token_ids for completion in alone]
    assert len(list(_plan_batches(requests, max_batch_size=64))) == 1
