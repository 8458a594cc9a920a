"""A real pretrained model of 135 million parameters, in one process, in two pipeline stages and in two replicas."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.train.conftest import make_part
from tests.train.megatron.conftest import reference_log_probs, weighted_loss
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import ModelConfig, OptimizerConfig, ParallelConfig, StackConfig
from unirl.data.tokenizer import load_tokenizer, stop_token_ids
from unirl.errors import UserError
from unirl.rollout.native import NativeRolloutEngine
from unirl.train.megatron.actor import MegatronActor
from unirl.train.packing import MicroBatch, plan_micro_batches
from unirl.types import GenerationRequest, SamplingParams

pytestmark = pytest.mark.llm
QUESTION = [{"role": "user", "content": "What is 3 + 4?"}]
ANSWERS = ("3 + 4 = 7", "It is 12")


def make_actor(folder: Path, parallel: ParallelConfig) -> MegatronActor:
    return MegatronActor(
        ModelConfig(path=str(folder)),
        parallel=parallel,
        optimizer=OptimizerConfig(lr=1e-5),
        stack=StackConfig(),
        temperature=1.0,
        total_steps=2,
        seed=0,
    )


def make_batches(folder: Path, **shape: int) -> list[MicroBatch]:
    tokenizer = load_tokenizer(str(folder))
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    part = make_part([(prompt, [tokenizer.encode(answer) for answer in ANSWERS])], rewards=[1.0, 0.0])
    return plan_micro_batches(part, torch.arange(2), token_budget=60, **shape)


def train(folder: Path, parallel: ParallelConfig, out: Path | None) -> dict:
    """Two iterations; `out` is where the weights that were read are exported to first."""
    actor = make_actor(folder, parallel)
    batches = make_batches(folder, **asdict(actor.shape))
    count = len(batches) // actor.shape.dp
    batches = batches[actor.dp_rank * count : (actor.dp_rank + 1) * count]
    if out is not None:
        actor.export_hf(out)
    log_probs, norms = [read_log_probs(actor, batches)], []
    for _ in range(2):
        actor.forward_backward(batches, weighted_loss)
        norms.append(actor.optimizer_step().grad_norm)
        log_probs.append(read_log_probs(actor, batches))
    actor.close()
    return {"log_probs": log_probs, "norms": norms}


def read_log_probs(actor: MegatronActor, batches: list[MicroBatch]) -> dict[int, float]:
    """By position of the token in the part, on the rank that reports."""
    found = actor.log_probs(batches)
    pairs = zip(batches, found, strict=True) if actor.reports else ()
    return {
        position: value
        for batch, (logp, _) in pairs
        for position, value in zip(batch.token_positions.tolist(), logp.tolist(), strict=True)
    }


@pytest.fixture(scope="module")
def alone(smollm2_folder):
    return train(smollm2_folder, ParallelConfig(), None)


@pytest.fixture(scope="module")
def two_stages(smollm2_folder, tmp_path_factory):
    """What both ranks report, together, and the folder that they exported."""
    exported = tmp_path_factory.mktemp("exported") / "policy"
    return train_on_two(smollm2_folder, ParallelConfig(pp=2), exported), exported


@pytest.fixture(scope="module")
def two_replicas(smollm2_folder):
    return train_on_two(smollm2_folder, ParallelConfig(use_distributed_optimizer=True), None), None


def train_on_two(folder: Path, parallel: ParallelConfig, out: Path | None) -> dict:
    ranks = run_ranks(train, 2, folder, parallel, out, timeout_s=300)
    steps = zip(*(rank["log_probs"] for rank in ranks), strict=True)
    return {"log_probs": [one | other for one, other in steps], "norms": [rank["norms"] for rank in ranks]}


def test_logits_and_log_probs_are_those_of_transformers(smollm2_folder, alone):
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder)
    batches = make_batches(smollm2_folder)
    actor = make_actor(smollm2_folder, ParallelConfig())
    with torch.no_grad():
        for batch in batches:
            first = int(batch.tree_cu_seqlens[1])
            rows = batch.predict_positions[batch.predict_positions < first]
            expected = model(batch.tokens[None, :first]).logits[0, rows]
            torch.testing.assert_close(actor.model(batch)[: len(rows)], expected, atol=1e-4, rtol=0)
            logp, _ = reference_log_probs(model, batch, 1.0)
            found = [alone["log_probs"][0][position] for position in batch.token_positions.tolist()]
            torch.testing.assert_close(torch.tensor(found), logp, atol=1e-4, rtol=0)
    actor.close()


@pytest.mark.parametrize("layout", ["two_stages", "two_replicas"])
def test_two_iterations_are_those_of_one_process(request, layout, alone):
    report, _ = request.getfixturevalue(layout)
    for found, expected in zip(report["log_probs"], alone["log_probs"], strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    for norms in report["norms"]:
        assert norms == pytest.approx(alone["norms"], rel=1e-4)
    before, after = (torch.tensor(list(alone["log_probs"][step].values())) for step in (0, 2))
    assert (after - before).abs().max() > 0.01


def test_the_export_of_two_stages_answers(two_stages):
    _, exported = two_stages
    tokenizer = load_tokenizer(str(exported))
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    params = SamplingParams(12, temperature=0.0, stop_token_ids=stop_token_ids(str(exported), tokenizer))
    engine = NativeRolloutEngine(exported, max_batch_size=1)
    ((completion,),) = engine.generate([GenerationRequest(prompt_ids=tuple(prompt), params=params, seeds=(0,))])
    assert "7" in tokenizer.decode(completion.token_ids)


def test_nine_heads_do_not_split_in_two(smollm2_folder):
    with pytest.raises(UserError, match=r"parallel\.tp=2 .* 9 attention heads, 3 key-value heads.*fit: 1, 3"):
        make_actor(smollm2_folder, ParallelConfig(tp=2))
