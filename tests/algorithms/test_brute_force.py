"""The whole space of configs against the definitions written out token by token (`brute_force`), with gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithms import brute_force
from tests.algorithms.batches import MODES, batches
from unirl import algorithms
from unirl.algorithms.loss import surrogate_terms
from unirl.kernels import available_backends, fused_policy_loss, token_logprob

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True)

CONSTANTS = {
    "ppo": {
        "eps_clip": st.sampled_from([0.0, 0.05, 0.2]),
        "eps_clip_higher": st.sampled_from([None, 0.0, 0.28]),
        "c_clip": st.sampled_from([None, 1.1, 3.0]),
    },
    "drpo": {"drpo_epsilon": st.sampled_from([0.2, 12.5])},
    "spo": {"spo_epsilon": st.sampled_from([0.2, 1])},
    "dppo": {"dppo_delta": st.sampled_from([0.02, 0.15])},
    "sapo": {"sapo_tau_pos": st.sampled_from([0.5, 1.0]), "sapo_tau_neg": st.sampled_from([1.05, 2.0])},
    "cispo": {"eps_clip": st.sampled_from([0.2, 1.0]), "eps_clip_higher": st.sampled_from([0.3, 4.0])},
}


@st.composite
def rejections(draw) -> dict | None:
    metric = draw(st.sampled_from([None, "ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"]))
    if metric is None:
        return None
    is_ratio = metric == "ratio"
    return {
        "metric": metric,
        "level": draw(st.sampled_from(["token", "sequence"])),
        "action": draw(st.sampled_from(["mask", "clamp"])) if is_ratio else "mask",
        "agg": draw(st.sampled_from(["sum", "mean", "max"])),
        "lower": draw(st.sampled_from([None, 0.7, 0.95] if is_ratio else [None, 0.001])),
        "upper": draw(st.sampled_from([1.05, 1.3] if is_ratio else [0.005, 0.1])),
    }


@st.composite
def configs(draw, levels=("token", "sequence"), kl_coefs=(0.0, 0.1)) -> dict:
    loss = draw(st.sampled_from(sorted(CONSTANTS)))
    decoupled = loss != "sapo" and draw(st.booleans())
    return {
        "loss": loss,
        **{name: draw(values) for name, values in CONSTANTS[loss].items()},
        "importance_sampling_level": draw(st.sampled_from(levels)) if loss != "cispo" else "token",
        "use_decoupled_loss": decoupled,
        "rejection_sampling": draw(rejections()) if decoupled else None,
        "loss_agg_mode": draw(st.sampled_from(MODES)),
        "horizon": 16,
        "kl_coef": draw(st.sampled_from(kl_coefs)),
        "kl_estimator": draw(st.sampled_from(["k1", "k2", "k3"])),
        "entropy_coef": draw(st.sampled_from([0.0, 0.01])),
    }


def gradients(loss: torch.Tensor, inputs: dict[str, torch.Tensor], names: list[str]) -> list[torch.Tensor]:
    if not loss.requires_grad:
        return [torch.zeros_like(inputs[name]) for name in names]
    leaves = [inputs[name] for name in names]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def assert_close(found, expected) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@settings(PROPERTY, max_examples=300)
@given(config=configs(), batch=batches, as_int32=st.booleans())
def test_policy_loss(config, batch, as_int32):
    inputs, plain = batch.inputs(), batch.inputs()
    expected = brute_force.policy_loss(config, plain)
    given_as = inputs
    if as_int32:
        narrow = {"cu_seqlens": inputs["cu_seqlens"].int(), "loss_mask": inputs["loss_mask"].int()}
        given_as = {**inputs, **narrow}
    output = algorithms.policy_loss(config, **given_as)
    assert_close(output.loss, expected)
    names = ["logp", "entropy"]
    expected_gradients = gradients(expected, plain, names)
    for found, gradient in zip(gradients(output.loss, inputs, names), expected_gradients, strict=True):
        assert_close(found, gradient)
    del given_as["entropy"]
    assert_close(algorithms.policy_loss_derivative(config, **given_as), expected_gradients[0])


@pytest.mark.parametrize("backend", available_backends())
def test_fused_policy_loss(backend):
    @settings(PROPERTY, max_examples=60)
    @given(config=configs(levels=("token",), kl_coefs=(0.0,)), batch=batches, seed=st.integers(0, 2**32))
    def check(config, batch, seed):
        generator = torch.Generator().manual_seed(seed)
        size, dtype = batch.logp.numel(), torch.float64 if backend == "reference" else torch.float32
        logits = torch.randn(size, 7, generator=generator).to(dtype).double().requires_grad_()
        targets = torch.randint(0, 7, (size,), generator=generator)
        distribution = torch.log_softmax(logits / 0.6, 1)
        plain = batch.inputs()
        # Near the rollout's own, so that ratios lie on both sides of the clips.
        plain["logp"] = distribution.gather(1, targets[:, None])[:, 0]
        shift = plain["logp"].detach() - batch.logp
        plain |= {name: (plain[name] + shift).clamp(max=-1e-4) for name in ("old_logp", "prox_logp")}
        plain["entropy"] = -(distribution.exp() * distribution).sum(1)
        expected = brute_force.policy_loss(config, plain)
        (gradient,) = gradients(expected, {"logits": logits}, ["logits"])

        constants = ("old_logp", "advantages", "loss_mask", "cu_seqlens", "prox_logp")
        terms = surrogate_terms(config, **{name: plain[name] for name in constants})
        overwritten = logits.detach().to(dtype).clone().requires_grad_()
        found = fused_policy_loss(
            overwritten,
            targets,
            algorithms.PolicyLossConfig(**{**config, "rejection_sampling": None}),
            old_logp=terms.old_logp,
            anchor_logp=terms.anchor_logp,
            advantages=terms.advantages,
            weights=terms.weights,
            entropy_weights=terms.entropy_weights,
            loss_mask=terms.live,
            temperature=0.6,
            backend=backend,
        )
        found.loss.backward()
        rtol, atol = (1e-9, 1e-12) if dtype == torch.float64 else (1e-4, 1e-5)
        torch.testing.assert_close(found.loss.double(), expected, rtol=rtol, atol=atol)
        torch.testing.assert_close(overwritten.grad.double(), gradient, rtol=rtol, atol=atol)

    check()


values = st.one_of(st.sampled_from([0.0, 1.0, float("nan"), float("inf")]), st.floats(-50, 50))
levels = st.sampled_from([None, "batch", "group"])


@PROPERTY
@given(
    rows=st.lists(st.tuples(values, st.integers(-2, 3)), max_size=12),
    config=st.fixed_dictionaries(
        {"mean_level": levels, "std_level": levels},
        optional={"mean_leave1out": st.booleans(), "std_unbiased": st.booleans(), "eps": st.sampled_from([1e-6, 0.1])},
    ),
)
def test_normalize(rows, config):
    given_values = torch.tensor([value for value, _ in rows], dtype=torch.float64)
    ids = torch.tensor([group for _, group in rows], dtype=torch.int32)
    found = algorithms.normalize(given_values, ids, config)
    expected = torch.tensor(brute_force.normalize(config, given_values.tolist(), ids.tolist()), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


LAMBDAS = st.sampled_from(
    [
        {},
        {"gae_lambda": 0},
        {"gae_lambda": 0.95, "gae_lambda_kwargs": {}},
        {"gae_lambda": "vapo_length_adaptive", "gae_lambda_kwargs": {"alpha": 0.5}},
        {"gae_lambda": "relative_position", "gae_lambda_kwargs": {"q": 0.5}},
        {"gae_lambda": "tests.algorithms.brute_force.half_to_the"},
        {"gae_lambda": "tests.algorithms.brute_force.half_to_the", "gae_lambda_kwargs": {"scale": 0.1}},
    ]
)


@st.composite
def rollouts(draw) -> dict[str, torch.Tensor]:
    lengths = draw(st.lists(st.integers(0, 8), max_size=5))
    size, generator = sum(lengths), torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    mask = torch.rand(size, generator=generator) < draw(st.sampled_from([0.3, 0.7, 1.0]))
    turns = [
        turn for n in lengths if n for turn in sorted(draw(st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
    ]
    return {
        **{name: torch.randn(size, generator=generator).double() for name in ("task_rewards", "kl_rewards", "values")},
        "loss_mask": mask,
        "turn_ids": torch.tensor(turns, dtype=torch.int32).masked_fill(~mask, -1),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        "truncated": torch.rand(len(lengths), generator=generator) < 0.5,
    }


@PROPERTY
@given(
    inputs=rollouts(),
    lam=LAMBDAS,
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    unit=st.sampled_from(["token", "turn"]),
)
def test_gae(inputs, lam, discount, unit):
    config = {"discount": discount, "gae_timestep_unit": unit, **lam}
    expected = brute_force.gae(config, inputs)
    for found, plain in zip(algorithms.gae(config, **inputs), expected, strict=True):
        assert_close(found, torch.tensor(plain, dtype=torch.float64))


@settings(PROPERTY, max_examples=20)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=6),
    zone=st.integers(1, 30),
    factor=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_overlong_penalty(lengths, zone, factor):
    config = {"overlong_tokens": zone, "max_new_tokens": 30, "overlong_penalty_factor": factor}
    rewards = [0.5 * i for i in range(len(lengths))]
    given_rewards = torch.tensor(rewards, dtype=torch.float64)
    found = algorithms.overlong_penalty(config, given_rewards, torch.tensor(lengths, dtype=torch.long))
    expected = torch.tensor(brute_force.overlong_penalty(config, rewards, lengths), dtype=torch.float64)
    assert_close(found, expected)


@settings(PROPERTY, max_examples=30)
@given(
    rows=st.integers(0, 4),
    width=st.integers(1, 9),
    temperature=st.sampled_from([0.6, 1.0, 1.3]),
    offset=st.sampled_from([0.0, -30.0, -1e4, 1e4]),
    seed=st.integers(0, 2**32),
)
def test_token_logprob(rows, width, temperature, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, width, generator=generator).double() + offset
    targets = torch.randint(0, width, (rows,), generator=generator)
    found = token_logprob(logits, targets, temperature=temperature, with_entropy=True, backend="reference")
    expected = brute_force.token_logprob(logits.tolist(), targets.tolist(), temperature)
    torch.testing.assert_close(
        torch.stack(found, 1), torch.tensor(expected, dtype=torch.float64).reshape(rows, 2), rtol=1e-9, atol=1e-9
    )
