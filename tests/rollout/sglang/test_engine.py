"""Samples of a real server: what they are, what they depend on, what is refused."""

import signal
import subprocess
import threading
import time
from dataclasses import replace

import aiohttp
import pytest
import torch

from tests.rollout.conftest import reference_log_probs
from tests.rollout.sglang.conftest import requests_in_progress, weights_of, while_generating
from unirl.types import GenerationRequest, SampleStatus, SamplingParams

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

PROMPTS = [(5, 6, 7), (9,), tuple(range(3, 40))]


def draw(engine, params: SamplingParams, seeds=range(6)):
    return engine.generate([GenerationRequest(prompt, params, tuple(seeds)) for prompt in PROMPTS])


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_log_probs_are_those_of_the_model(published, model, temperature):
    for prompt, samples in zip(PROMPTS, draw(published, SamplingParams(24, temperature)), strict=True):
        for sample in samples:
            expected = reference_log_probs(model, prompt, sample.token_ids, temperature)
            torch.testing.assert_close(torch.tensor(sample.log_probs), expected, atol=1e-4, rtol=0)
            assert len(sample.token_ids) == len(sample.weight_versions) == 24
            assert sample.status is SampleStatus.TRUNCATED


def test_greedy_samples_take_the_likeliest_token(published, model):
    sample = draw(published, SamplingParams(8, temperature=0), seeds=[0])[0][0]
    tokens = list(PROMPTS[0])
    for token in sample.token_ids:
        with torch.no_grad():
            assert token == int(model(torch.tensor([tokens])).logits[0, -1].argmax())
        tokens.append(token)
    expected = reference_log_probs(model, PROMPTS[0], sample.token_ids)
    torch.testing.assert_close(torch.tensor(sample.log_probs), expected, atol=1e-4, rtol=0)


def test_a_sample_depends_on_its_seed_alone(published):
    params = SamplingParams(20)
    together = draw(published, params)
    for prompt, samples in zip(PROMPTS, together, strict=True):
        alone = published.generate([GenerationRequest(prompt, params, (3,))])[0][0]
        assert alone.token_ids == samples[3].token_ids
        assert len({sample.token_ids for sample in samples}) == len(samples)


def test_samples_are_of_the_distribution(published, model):
    num_samples, num_bins = 600, 20
    [samples] = published.generate([GenerationRequest(PROMPTS[0], SamplingParams(1), tuple(range(num_samples)))])
    with torch.no_grad():
        probabilities = model(torch.tensor([PROMPTS[0]])).logits[0, -1].softmax(-1)
    bins = torch.arange(len(probabilities)) % num_bins
    expected = torch.zeros(num_bins).index_add_(0, bins, probabilities) * num_samples
    found = torch.bincount(bins[[sample.token_ids[0] for sample in samples]], minlength=num_bins)
    chi_square = ((found - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - (num_bins - 1)) < 5 * (2 * (num_bins - 1)) ** 0.5


def test_stop_tokens_end_a_sample_and_are_kept(published):
    whole = draw(published, SamplingParams(24))[0]
    stop = whole[0].token_ids[5]
    for cut, sample in zip(draw(published, SamplingParams(24, stop_token_ids=(stop,)))[0], whole, strict=True):
        ends = sample.token_ids.index(stop) + 1 if stop in sample.token_ids else 24
        assert cut.token_ids == sample.token_ids[:ends]
        assert cut.status is (SampleStatus.COMPLETED if stop in sample.token_ids else SampleStatus.TRUNCATED)


def test_the_models_own_end_token_does_not_end_a_sample(published, model):
    """Only stop_token_ids do, as the protocol says."""
    end, unused = model.config.eos_token_id, model.vocab_size - 1
    request = GenerationRequest(PROMPTS[0], SamplingParams(100), tuple(range(8)))
    [free] = published.generate([request])
    assert any(end in sample.token_ids[:-1] for sample in free)
    stops = SamplingParams(100, stop_token_ids=(unused,))
    [samples] = published.generate([GenerationRequest(PROMPTS[0], stops, tuple(range(8)))])
    for sample, other in zip(samples, free, strict=True):
        if unused not in other.token_ids:
            assert sample.token_ids == other.token_ids


def test_narrowed_sampling(published):
    greedy = draw(published, SamplingParams(8, temperature=0), seeds=[0])[0][0]
    assert draw(published, SamplingParams(8, top_k=1))[0][4].token_ids == greedy.token_ids
    assert draw(published, SamplingParams(8, top_p=1e-6))[0][4].token_ids == greedy.token_ids


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerationRequest((5, 9999), SamplingParams(4), (0,)), r"request 0: prompt_ids has \[9999\], outside"),
        (GenerationRequest((5, -1), SamplingParams(4), (0,)), r"prompt_ids has \[-1\], outside"),
        (GenerationRequest((5,), SamplingParams(4, stop_token_ids=(9999,)), (0,)), "stop_token_ids has"),
        (GenerationRequest((5,) * 128, SamplingParams(4), (0,)), r"has 128 tokens; expected .* at most 12\d"),
        (GenerationRequest((), SamplingParams(4), (0,)), "has 0 tokens"),
        (GenerationRequest((5,), SamplingParams(0), (0,)), "max_new_tokens >= 1"),
    ],
)
def test_what_would_harm_the_server_is_refused(engine, request_, message):
    restarts = engine.metrics()["rollout/server_restarts"]
    with pytest.raises(ValueError, match=message):
        engine.generate([request_])
    assert engine.metrics()["rollout/server_restarts"] == restarts


def test_a_sample_ends_where_the_context_does(published):
    [[sample]] = published.generate([GenerationRequest((5,) * 120, SamplingParams(50), (0,))])
    assert sample.status is SampleStatus.TRUNCATED
    assert 5 <= len(sample.token_ids) <= 8
    longest = published.run(published.controls[0].info()).max_prompt_tokens
    [[sample]] = published.generate([GenerationRequest((5,) * longest, SamplingParams(50), (0,))])
    assert sample.token_ids


def test_progress_counts_finished_samples(published):
    seen = []
    published.generate([GenerationRequest(PROMPTS[0], SamplingParams(4), tuple(range(20)))], seen.append)
    assert seen == list(range(1, 21))


def test_abort_keeps_the_tokens_so_far(published):
    samples = while_generating(published, published.abort_all)
    aborted = [sample for sample in samples if sample.status is SampleStatus.ABORTED]
    assert aborted
    assert all(len(sample.token_ids) == len(sample.log_probs) < 100 for sample in aborted)
    assert published.run(published.controls[0].running()) == 0


def test_pause_and_resume(published):
    undisturbed = published.generate(requests_in_progress())[1]

    def pause_and_resume() -> None:
        published.pause("retract")
        published.resume()

    samples = while_generating(published, pause_and_resume)
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in undisturbed]


def test_ctrl_c_leaves_nothing_running(published):
    """The interrupt comes in the main thread, which waits; the requests are broken off and the server drops them."""

    def interrupt(finished: int) -> None:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def stop(number, frame) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            published.generate(requests_in_progress(), interrupt)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    deadline = time.monotonic() + 30
    while published.run(published.controls[0].running()):
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_memory_is_released_and_taken_again(published, model):
    before = published.generate(requests_in_progress(4, 8))[1]
    published.release_memory()
    published.update_weights(weights_of(model), published.weight_version + 1)
    after = published.generate(requests_in_progress(4, 8))[1]
    assert [sample.token_ids for sample in after] == [sample.token_ids for sample in before]


def test_the_api_key_is_asked_for_and_not_shown(published, tmp_path):
    [(url, key)] = published.endpoints
    assert int(key, 16) > 0  # SGLang takes one that begins with a dash for an option

    async def status(headers: dict[str, str]) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/model_info", headers=headers) as response:
            return response.status

    assert published.run(status({})) == 401
    assert published.run(status({"Authorization": f"Bearer {key}"})) == 200
    assert key not in subprocess.run(["ps", "-ww", "axo", "args"], capture_output=True, text=True, check=True).stdout
    assert url.startswith("http://127.0.0.1:")


REPLAYED = SamplingParams(16, temperature=0.1, top_p=0.5, top_k=12, return_support=True)


def test_a_narrowed_sample_says_what_it_was_drawn_from(published, model):
    """Supports are those of the sampler's rule: the `top_k` likeliest, and of these the ones before which the running
    sum of the whole distribution has not passed `top_p`. Log-probs are renormalised over them.
    """
    sizes = set()
    for prompt, samples in zip(PROMPTS, draw(published, REPLAYED), strict=True):
        for sample in samples:
            tokens = torch.tensor([[*prompt, *sample.token_ids]])
            with torch.no_grad():
                rows = (model(tokens).logits[0, len(prompt) - 1 : -1] / REPLAYED.temperature).double().log_softmax(-1)
            for row, token, logp, support in zip(rows, sample.token_ids, sample.log_probs, sample.support, strict=True):
                probs, order = row.exp().sort(descending=True)
                before = probs.cumsum(0) - probs
                kept = set(order[: REPLAYED.top_k][before[: REPLAYED.top_k] <= REPLAYED.top_p].tolist())
                assert set(support) == kept
                assert len(support) == len(kept)
                assert logp == pytest.approx((row[token] - row[list(support)].logsumexp(0)).item(), abs=1e-4)
                sizes.add(len(kept))
    assert len(sizes) > 2
    assert max(sizes) <= REPLAYED.top_k


def test_a_narrowed_sample_depends_on_its_seed_alone(published):
    """And not on whether the support is asked for."""
    together = draw(published, REPLAYED)[0]
    alone = published.generate([GenerationRequest(PROMPTS[0], REPLAYED, (3,))])[0][0]
    silent = published.generate([GenerationRequest(PROMPTS[0], replace(REPLAYED, return_support=False), (3,))])[0][0]
    assert alone.token_ids == together[3].token_ids == silent.token_ids
    assert alone.support == together[3].support
    assert silent.support is None
