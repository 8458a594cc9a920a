"""From prompts to a packed Part."""

import time
from array import array
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.rollout.conftest import reference_log_probs
from unirl.rollout import pack_completions, sample_seed, single_turn
from unirl.rollout.native import NativeRolloutEngine
from unirl.types import Completion, SampleStatus, SamplingParams

PARAMS = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(8)))
PROMPTS = [
    SimpleNamespace(token_ids=(10, 11, 12), record={"answer": "a"}, index=4),
    SimpleNamespace(token_ids=(20,), record={"answer": "b"}, index=9),
    SimpleNamespace(token_ids=(10, 11, 12), record={"answer": "a"}, index=4),
]


def roll_out(engine, **changes):
    arguments = {"params": PARAMS, "seed": 1, "iteration": 2, "num_samples": 4, "first_sample_id": 100, **changes}
    return single_turn(
        engine, changes.pop("prompts", PROMPTS), **{k: v for k, v in arguments.items() if k != "prompts"}
    )


def completion(tokens, status=SampleStatus.COMPLETED, version=3):
    return Completion(tuple(tokens), tuple(-0.5 * t for t in tokens), status, (version,) * len(tokens))


def test_packing_by_hand():
    part = pack_completions(
        PROMPTS[:2],
        [[completion([1, 2]), completion([3], SampleStatus.TRUNCATED, 4)], [completion([], SampleStatus.ABORTED)]],
        first_sample_id=7,
    )
    text = part.text
    assert text.tokens.tolist() == [10, 11, 12, 1, 2, 10, 11, 12, 3, 20]
    assert text.log_probs.tolist() == [0, 0, 0, -0.5, -1.0, 0, 0, 0, -1.5, 0]
    assert text.loss_mask.int().tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 0]
    assert text.turn_ids.tolist() == [-1, -1, -1, 0, 0, -1, -1, -1, 0, -1]
    assert text.weight_versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, -1, 4, -1]
    assert text.lengths.tolist() == [5, 4, 1]
    assert text.sample_ids.tolist() == [7, 8, 9]
    assert text.group_ids.tolist() == [7, 7, 9]
    assert text.episode_ids.tolist() == [7, 8, 9]
    assert text.status.tolist() == [SampleStatus.COMPLETED, SampleStatus.TRUNCATED, SampleStatus.ABORTED]
    assert [record["answer"] for record in part.records] == ["a", "a", "b"]


def test_nothing_to_pack():
    assert len(pack_completions([], [], first_sample_id=0)) == 0
    assert len(pack_completions(PROMPTS, [[], [], []], first_sample_id=0)) == 0


def test_a_completion_of_uneven_fields_is_refused():
    uneven = Completion((1, 2), (-1.0,), SampleStatus.COMPLETED, (0, 0))
    with pytest.raises(ValueError, match="2 tokens, 1 log-probs and 2 weight versions"):
        pack_completions(PROMPTS[:1], [[uneven]], first_sample_id=0)


def test_supports_are_packed_to_the_longest():
    samples = [
        replace(completion([1, 2]), support=(array("i", [1]), array("i", [9, 2, 8]))),
        replace(completion([3]), support=(array("i", [3, 4]),)),
        completion([], SampleStatus.ABORTED),
    ]
    text = pack_completions(PROMPTS[1:2], [samples], first_sample_id=0).text
    nothing = [-1] * 3
    assert text.support.tolist() == [nothing, [1, -1, -1], [9, 2, 8], nothing, [3, 4, -1], nothing]
    assert text.support.dtype == torch.int32
    assert pack_completions(PROMPTS[1:2], [samples[2:]], first_sample_id=0).text.support is None


@pytest.mark.parametrize(
    ("support", "message"),
    [
        (None, "found no support, expected that of its 2 tokens"),
        ((array("i", [1]),), "found the support of 1 tokens, expected that of its 2 tokens"),
        ((array("i", [1]), array("i", [1, 3])), r"found 1 tokens that are not in the support .* 2 in \[1, 3\]"),
    ],
)
def test_a_token_from_outside_its_support_is_refused(support, message):
    good = replace(completion([3]), support=(array("i", [3]),))
    with pytest.raises(ValueError, match=message):
        pack_completions(PROMPTS[:1], [[good, replace(completion([1, 2]), support=support)]], first_sample_id=0)


def test_single_turn_on_a_model(models):
    model, folder = models["qwen3"]
    text = roll_out(NativeRolloutEngine(folder, max_batch_size=64)).text
    assert text.sample_ids.tolist() == list(range(100, 112))
    assert text.group_ids.tolist() == [100] * 4 + [104] * 4 + [108] * 4
    for sample, (start, stop) in enumerate(pairwise(text.cu_seqlens.tolist())):
        prompt = PROMPTS[sample // 4].token_ids
        tokens = text.tokens[start:stop].tolist()
        assert tuple(tokens[: len(prompt)]) == prompt
        expected = reference_log_probs(model, prompt, tokens[len(prompt) :])
        torch.testing.assert_close(text.log_probs[start + len(prompt) : stop], expected, atol=1e-5, rtol=0)


def test_the_same_prompt_twice_is_two_groups_of_other_samples(engine):
    text = roll_out(engine).text
    sequences = [text.tokens[start:stop].tolist() for start, stop in pairwise(text.cu_seqlens.tolist())]
    assert sequences[:4] != sequences[8:]


def test_samples_depend_on_seed_and_iteration_alone(engine):
    first = roll_out(engine)
    roll_out(engine, iteration=3)
    again = roll_out(engine)
    assert torch.equal(first.text.tokens, again.text.tokens)
    assert torch.equal(first.text.log_probs, again.text.log_probs)
    for changes in ({"seed": 2}, {"iteration": 3}):
        assert not torch.equal(roll_out(engine, **changes).text.tokens, first.text.tokens)


def test_prompts_drawn_in_two_calls_are_as_those_of_one(engine):
    whole = roll_out(engine).text
    first = roll_out(engine, prompts=PROMPTS[:1]).text
    second = roll_out(engine, prompts=PROMPTS[1:], first_position=1, first_sample_id=104).text
    assert torch.equal(torch.cat([first.tokens, second.tokens]), whole.tokens)
    assert torch.equal(torch.cat([first.group_ids, second.group_ids]), whole.group_ids)


def test_sample_seeds_are_fixed_and_distinct():
    assert sample_seed(0, 0, 0, 0) == sample_seed(0, 0, 0, 0)
    grid = [(s, i, p, n) for s in (0, 1, 2**40) for i in range(4) for p in range(5) for n in range(6)]
    seeds = {sample_seed(*point) for point in grid}
    assert len(seeds) == len(grid)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("num_tokens", "limit_s"), [(35, 0.02), (8192, 2.0)])
def test_packing_is_fast(num_tokens, limit_s):
    group = [completion(range(num_tokens)) for _ in range(8)]
    seconds = []
    for _ in range(3):
        start = time.process_time()
        pack_completions([PROMPTS[0]] * 64, [group] * 64, first_sample_id=0)
        seconds.append(time.process_time() - start)
    assert min(seconds) < limit_s
