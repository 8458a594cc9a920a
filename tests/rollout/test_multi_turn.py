"""Episodes on a real model with the chat template of a real tokenizer."""

import logging
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import transformers

from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer
from tests.rollout import environments
from tests.rollout.conftest import reference_log_probs
from unirl.rollout import EpisodeLimits, MultiTurnWorkflow, single_turn, split_steps, turn_seed
from unirl.rollout.native import NativeRolloutEngine
from unirl.types import SampleStatus, SamplingParams

TOKENIZER = make_tokenizer(CHAT_TEMPLATE)
END = TOKENIZER.eos_token_id
PROMPTS = [
    SimpleNamespace(
        token_ids=tuple(TOKENIZER(f"<|user|>{text}<|end|><|assistant|>")["input_ids"]), record={"answer": text}
    )
    for text in ("hello", "and")
]
PARAMS = SamplingParams(max_new_tokens=24, stop_token_ids=(END,))
LIMITS = EpisodeLimits(max_turns=4, max_episode_tokens=200)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A random model of the tokenizer's vocabulary that likes to end its turn."""
    torch.manual_seed(3)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.Qwen3Config(
        vocab_size=len(TOKENIZER),
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=400,
        tie_word_embeddings=False,
        initializer_range=0.15,
        **shape,
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        # A head that reads the constant part of the last norm: the end of turn comes after some ten tokens.
        model.model.norm.weight.add_(torch.randn(32) * 0.3)
        model.lm_head.weight[END] *= 3
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module")
def engine(model_folder):
    return NativeRolloutEngine(model_folder[1], max_batch_size=64)


def run(engine, environment, *, limits=LIMITS, params=PARAMS, num_samples=6, **changes):
    workflow = MultiTurnWorkflow(engine, environment, TOKENIZER, stop_token_ids=(END,), limits=limits)
    arguments = {"seed": 1, "iteration": 2, "first_sample_id": 100, **changes}
    return workflow(PROMPTS, params=params, num_samples=num_samples, **arguments)


@pytest.fixture(scope="module")
def episodes(engine):
    return run(engine, environments.Counter)


def sequences(part):
    bounds = part.text.cu_seqlens.tolist()
    return [slice(*bound) for bound in pairwise(bounds)]


def spans(part, where):
    """Of one sample: (turn id, tokens) of every run of equal turn ids."""
    found = []
    for token, turn in zip(part.text.tokens[where].tolist(), part.text.turn_ids[where].tolist(), strict=True):
        if not found or found[-1][0] != turn:
            found.append((turn, []))
        found[-1][1].append(token)
    return found


def test_an_episode_is_what_the_template_would_write(episodes):
    text = episodes.text
    assert SampleStatus.COMPLETED in text.status.tolist()
    assert SampleStatus.TRUNCATED in text.status.tolist(), "a turn without end"
    for row, where in enumerate(sequences(episodes)):
        found = spans(episodes, where)
        assert [turn for turn, _ in found] == [t for turn in range(len(found) // 2) for t in (-1, turn)]
        assert tuple(found[0][1]) == PROMPTS[row // 6].token_ids
        for (_, response), (_, observation) in zip(found[1::2], found[2::2], strict=False):
            letters = sum(c.isascii() and c.isalpha() for c in TOKENIZER.decode(response, skip_special_tokens=True))
            assert response[-1] == END
            assert TOKENIZER.decode(observation) == f"<|user|>{letters} letters<|end|><|assistant|>"
        if text.status[row] == SampleStatus.COMPLETED:
            assert len(found) == 6


def test_masks_turns_and_versions(episodes):
    text = episodes.text
    assert torch.equal(text.loss_mask, text.turn_ids >= 0)
    assert torch.equal(text.loss_mask, text.weight_versions >= 0)
    assert bool((text.log_probs[~text.loss_mask] == 0).all())
    assert text.sample_ids.tolist() == text.episode_ids.tolist() == list(range(100, 112))
    assert text.group_ids.tolist() == [100] * 6 + [106] * 6
    assert text.turn_counts.tolist() == [len(spans(episodes, where)) // 2 for where in sequences(episodes)]


def test_rewards_add_up_turn_by_turn(episodes):
    torch.testing.assert_close(episodes.rewards, episodes.text.sum_by_sample(episodes.turn_rewards))
    for where, reward in zip(sequences(episodes), episodes.rewards.tolist(), strict=True):
        texts = [TOKENIZER.decode(ids, skip_special_tokens=True) for turn, ids in spans(episodes, where) if turn >= 0]
        letters = sum(c.isascii() and c.isalpha() for c in "".join(texts))
        assert reward == pytest.approx(letters / 10)


def test_log_probs_are_those_of_the_whole_context(episodes, model_folder):
    model = model_folder[0]
    for where in sequences(episodes):
        tokens, mask = episodes.text.tokens[where], episodes.text.loss_mask[where]
        expected = reference_log_probs(model, tokens[:1].tolist(), tokens[1:].tolist())
        torch.testing.assert_close(episodes.text.log_probs[where][mask], expected[mask[1:]], atol=1e-5, rtol=0)


def test_an_episode_of_one_turn_is_a_single_turn_sample(engine):
    one = run(engine, partial(environments.Counter, turns=1))
    single = single_turn(engine, PROMPTS, params=PARAMS, seed=1, iteration=2, num_samples=6, first_sample_id=100)
    for name in ("tokens", "loss_mask", "turn_ids", "lengths", "status", "group_ids", "sample_ids"):
        assert torch.equal(getattr(one.text, name), getattr(single.text, name)), name


def test_turns_depend_on_the_sample_alone(engine, episodes):
    again = run(engine, environments.Counter)
    assert torch.equal(again.text.tokens, episodes.text.tokens)
    fewer = run(engine, environments.Counter, num_samples=2)
    assert torch.equal(fewer.text.tokens[sequences(fewer)[1]], episodes.text.tokens[sequences(episodes)[1]])
    later = run(engine, environments.Counter, first_position=1)
    assert not torch.equal(later.text.tokens, episodes.text.tokens)


class Watched:
    """The engine, with the requests of each call kept; it gives up the samples of call `gives_up`."""

    def __init__(self, engine, gives_up=None):
        self.engine, self.gives_up, self.calls = engine, gives_up, []

    def generate(self, requests, on_progress=None):
        self.calls.append(requests)
        completions = self.engine.generate(requests, on_progress)
        if len(self.calls) - 1 != self.gives_up:
            return completions
        return [[replace(done, status=SampleStatus.ABORTED) for done in group] for group in completions]


def test_all_live_episodes_take_their_turn_in_one_call(engine, episodes):
    watched, heard = Watched(engine), []
    part = run(watched, environments.Counter, on_progress=heard.append)
    assert torch.equal(part.text.tokens, episodes.text.tokens)
    turns = episodes.text.turn_counts
    assert len(watched.calls) == int(turns.max()) == 3
    assert len(watched.calls[0]) == 2, "samples of one prompt share a request"
    sampled = [sum(len(request.seeds) for request in requests) for requests in watched.calls]
    assert sampled == [int((turns > turn).sum()) for turn in range(3)]
    assert heard == [12 - live for live in sampled]


def test_a_turn_that_the_engine_gives_up_aborts_its_episode(engine, episodes):
    part = run(Watched(engine, gives_up=1), environments.Counter)
    goes_on = episodes.text.turn_counts > 1
    assert torch.equal(part.text.status == SampleStatus.ABORTED, goes_on)
    assert torch.equal(part.rewards.isnan(), goes_on)
    assert part.text.turn_counts[goes_on].tolist() == [2] * int(goes_on.sum())


def test_turn_seeds_are_distinct():
    seeds = [turn_seed(seed, turn) for seed in (0, 1, 2**62) for turn in range(20)]
    assert len(set(seeds)) == len(seeds)
    assert turn_seed(7, 0) == 7
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_last_turn_ends_an_episode_truncated(engine):
    part = run(engine, partial(environments.Counter, turns=9), limits=EpisodeLimits(2, 200))
    assert set(part.text.status.tolist()) == {SampleStatus.TRUNCATED}
    assert int(part.text.turn_counts.max()) == 2
    for where in sequences(part):
        assert part.text.loss_mask[where][-1], "an observation that nothing answers is left out"


@pytest.mark.parametrize("longest", [1, 10, 40, 63])
def test_an_episode_never_exceeds_its_tokens(engine, longest):
    part = run(engine, partial(environments.Counter, turns=9), limits=EpisodeLimits(9, longest))
    behind = part.text.lengths - part.text.prompt_lengths
    assert int(behind.max()) <= longest
    assert set(part.text.status.tolist()) == {SampleStatus.TRUNCATED}
    assert bool((part.text.response_lengths > 0).all())


def test_a_turn_that_is_cut_off_is_judged_and_ends_the_episode(engine):
    part = run(engine, environments.Counter, params=SamplingParams(max_new_tokens=2, stop_token_ids=(END,)))
    cut = (part.text.status == SampleStatus.TRUNCATED).nonzero().flatten().tolist()
    assert cut
    for row in cut:
        last = spans(part, sequences(part)[row])[-1]
        assert last[0] >= 0
        assert len(last[1]) == 2
        assert last[1][-1] != END
    assert bool(part.rewards.isfinite().all())


def test_only_what_was_generated_has_a_support(engine):
    """Over whole episodes and over their steps, in which other turns are context."""
    params = replace(PARAMS, top_k=40, top_p=0.9, return_support=True)
    part = run(engine, environments.Counter, params=params)
    assert int(part.text.turn_counts.max()) > 1
    for text in (part.text, split_steps(part, max_turns=4).text):
        drawn = (text.support == text.tokens[:, None]).any(1)
        assert torch.equal(drawn, text.loss_mask)
        assert bool((text.support[~text.loss_mask] == -1).all())


def test_an_opening_message_stands_before_the_first_response(engine):
    part = run(engine, partial(environments.Counter, opening="count"), num_samples=1)
    prompt = spans(part, sequences(part)[0])[0][1]
    assert TOKENIZER.decode(prompt) == "<s><|user|>hello<|end|><|user|>count<|end|><|assistant|>"


def test_an_environment_that_raises_aborts_its_episode_alone(engine, episodes, caplog):
    with caplog.at_level(logging.WARNING):
        part = run(engine, partial(environments.Fragile, fails_on=3))
    aborted = part.text.status == SampleStatus.ABORTED
    assert 0 < int(aborted.sum()) < len(part)
    assert torch.equal(part.rewards.isnan(), aborted)
    assert f"{int(aborted.sum())} of 12 episodes were aborted" in caplog.text
    assert "RuntimeError: bad length" in caplog.text
    for row in (~aborted).nonzero().flatten().tolist():
        mine, undisturbed = sequences(part)[row], sequences(episodes)[row]
        assert torch.equal(part.text.tokens[mine], episodes.text.tokens[undisturbed])


def test_an_episode_that_cannot_begin_is_counted(engine, caplog):
    part = run(engine, environments.RaisesAtReset)
    assert set(part.text.status.tolist()) == {SampleStatus.ABORTED}
    assert part.text.response_lengths.tolist() == [0] * 12
    assert bool(part.rewards.isnan().all())
    assert "no such field" in caplog.text
    assert len(split_steps(part, max_turns=4)) == 0


def test_an_environment_that_breaks_the_protocol_is_told(engine, caplog):
    part = run(engine, environments.SaysNothing)
    assert SampleStatus.ABORTED in part.text.status.tolist()
    assert "expected at least one message where the episode is not done" in caplog.text
