"""The audit of layouts, as users run it: it passes what is right, finds what is wrong, and shows what it left out."""

import math
from dataclasses import replace

import pytest
import torch

from unirl.audit.__main__ import main
from unirl.audit.parallel import cases, run
from unirl.audit.parallel.compare import QUANTITIES, TOLERANCES, compare
from unirl.audit.parallel.layouts import parse_layouts
from unirl.audit.parallel.train import Outcome
from unirl.cluster.spawn import run_ranks
from unirl.config.schema import ParallelConfig
from unirl.errors import UserError


@pytest.fixture(autouse=True)
def few_cases(monkeypatch):
    chosen = ("drpo", "ppo with KL", "ppo with a critic")
    monkeypatch.setattr(cases, "DENSE", [plan for plan in cases.DENSE if plan.name in chosen])


def test_layouts_that_are_right_pass_and_one_that_cannot_be_is_shown(capsys):
    assert main(["parallel", "--layouts", "tp=2,dp=2+distributed,tp=16"]) == 0
    output = capsys.readouterr().out
    assert "2 passed, 0 failed, 1 skipped" in output
    assert "skipped tp=16: parallel.tp=16 does not divide what the model has: 8 attention heads" in output
    lines = {line.split()[0]: line.split() for line in output.splitlines() if line.strip()}
    assert all(0 < float(found) <= 1e-5 for found in lines["tp=2"][1:7])
    assert lines["tp=2"][7] == "yes"
    assert lines["tp=16"][-1] == "skipped"
    assert lines["allowed"][1:] == ["1e-05"] * 5 + ["3e-06"]


def with_defects(function, *args):
    """On a rank: gradients are averaged over replicas, and a split vocabulary has its padding counted."""
    from unirl.train.megatron import policy, training

    log_probs, finalize = policy.token_logprob, training._finalize_undivided

    def count_padding(logits, targets, *, group, vocab, **options):
        return log_probs(logits, targets, group=group, vocab=None if group else vocab, **options)

    def average(chunks, *args, **kwargs):
        finalize(chunks, *args, **kwargs)
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            parameter.main_grad.mul_(1 / torch.distributed.get_world_size(chunks[0].dp_cp_group))

    policy.token_logprob, training._finalize_undivided = count_padding, average
    return function(*args)


def test_defects_are_found_where_they_are(monkeypatch, capsys):
    def broken(function, num_ranks, *args, timeout_s):
        return run_ranks(with_defects, num_ranks, function, *args, timeout_s=timeout_s)

    monkeypatch.setattr(run, "run_ranks", broken)
    recipe = ["--config-name", "ar/arith_drpo_tiny_cpu", "model.path=not_made"]
    assert main(["parallel", "--layouts", "tp=2,dp=2", *recipe]) == 1
    captured = capsys.readouterr()
    assert "0 passed, 2 failed, 0 skipped" in captured.out
    assert "model.path=not_made is no folder here: a small random model takes its place" in captured.err
    failures = [line.removeprefix("FAILED ") for line in captured.out.splitlines() if line.startswith("FAILED")]
    assert len({line.split(", drpo, ")[1].partition(":")[0] for line in failures}) == 3, "three token budgets"
    found = {(line.split(",")[0], line.split(": ")[1]) for line in failures}
    assert {("tp=2", "log-probs"), ("dp=2", "gradients"), ("dp=2", "grad norm")} <= found
    assert ("dp=2", "log-probs") not in found


def test_ranks_that_do_not_end_are_a_failure(capsys):
    assert main(["parallel", "--layouts", "cp=2", "--timeout-s", "0.01"]) == 1
    assert "FAILED cp=2: rank 0, 1 of 2 not done after 0 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "tp=2+ps"], "'ps' in 'tp=2+ps' is unknown; the nearest is sp"),
        (["--layouts", "pt=2"], "'pt=2' in 'pt=2' is unknown; the nearest is "),
        (["--layouts", "tp=0"], "found tp=0 in 'tp=0', expected a whole number from 1"),
        (["--layouts", "ep=2+dp=3"], "ep=2 in 'ep=2+dp=3' does not divide tp*cp*dp = 3"),
        (["--layouts", ","], "names no layout"),
        (["stack.recompute=full"], "found stack.recompute=full, but keys are those of a recipe"),
        (["--config-name", "ar/arith_drpo_tiny_cpu", "stack.recomput=full"], "unknown key; the nearest is"),
        (["--config-name", "ar/arith_drpo"], "the nearest is ar/arith_drpo_tiny_cpu"),
    ],
)
def test_a_command_line_that_cannot_be_is_refused(arguments, message, capsys):
    assert main(["parallel", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_layouts_as_they_are_written():
    base = ParallelConfig(tp=8, sequence_parallel=True, deterministic=True)
    one, two, three = parse_layouts("tp=2+cp=2+sp, ep=4+tp=2+sp, pp=2+vpp=2+dp=3+distributed, ", base)
    assert (one.num_ranks, two.num_ranks, three.num_ranks) == (4, 4, 6)
    assert one.parallel == ParallelConfig(tp=2, cp=2, sequence_parallel=True, deterministic=True)
    assert three.parallel == ParallelConfig(pp=2, vpp=2, use_distributed_optimizer=True, deterministic=True)
    with pytest.raises(UserError, match="found vpp=1"):
        parse_layouts("pp=2+vpp=1")


OUTCOME = Outcome(
    token_values={"logp": torch.tensor([math.nan, -1.0, -2.0])},
    metrics=[{"loss": 0.5, "grad_norm": 2.0, "ratio_max": 3.0, "optimizer_steps": 1}] * 3,
    gradients={"a": torch.tensor([1e-3, 0.0]), "b": torch.tensor([5.0])},
    weights={"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])},
    ranks_agree=True,
)


@pytest.mark.parametrize(
    ("quantity", "where", "changes"),
    [
        ("log-probs", "logp", {"token_values": {"logp": torch.tensor([math.nan, -1.0, -2.00002])}}),
        ("log-probs", "logp", {"token_values": {"logp": torch.tensor([math.nan, math.nan, -2.0])}}),
        ("loss", "loss", {"metrics": [*OUTCOME.metrics[:2], {**OUTCOME.metrics[0], "loss": 0.50002}]}),
        ("metrics", "ratio_max", {"metrics": [*OUTCOME.metrics[:2], {**OUTCOME.metrics[0], "ratio_max": math.nan}]}),
        ("grad norm", "grad_norm", {"metrics": [*OUTCOME.metrics[:2], {**OUTCOME.metrics[0], "grad_norm": 2.0001}]}),
        ("gradients", "a", {"gradients": {**OUTCOME.gradients, "a": torch.tensor([1e-3, 2e-8])}}),
        ("gradients", "b", {"gradients": {**OUTCOME.gradients, "b": torch.tensor([math.inf])}}),
        ("weights", "b", {"weights": {**OUTCOME.weights, "b": torch.tensor([3.00001])}}),
        ("ranks agree", "metrics, or weights of replicas", {"ranks_agree": False}),
    ],
)
def test_one_difference_alone_fails_and_is_named(quantity, where, changes):
    differences = compare(replace(OUTCOME, **changes), OUTCOME, TOLERANCES["float32"])
    assert tuple(differences) == QUANTITIES
    assert [(name, found.where) for name, found in differences.items() if not found.passed] == [(quantity, where)]


def test_what_one_outcome_lacks_is_an_error():
    with pytest.raises(ValueError, match=r"weights: found \['a'\], expected \['a', 'b'\]"):
        compare(replace(OUTCOME, weights={"a": OUTCOME.weights["a"]}), OUTCOME, TOLERANCES["float32"])
