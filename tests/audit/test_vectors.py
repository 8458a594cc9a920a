"""The conformance vectors, through the audit that users run; and that the audit sees what is wrong."""

import json
from pathlib import Path

import pytest

from unirl.audit.__main__ import main
from unirl.audit.vectors import run_vectors
from unirl.kernels import available_backends

VECTORS = Path(__file__).parent.parent / "vectors"


def test_every_vector_in_both_precisions_and_on_every_backend():
    outcomes = list(run_vectors(VECTORS))
    assert [outcome for outcome in outcomes if outcome.problem] == []
    cases = {case["name"] for file in VECTORS.glob("*.json") for case in json.loads(file.read_text())}
    assert {outcome.case for outcome in outcomes} == cases
    settings = {outcome.setting for outcome in outcomes}
    assert settings >= {"float64", "float32", "float64, reference"}
    assert settings >= {f"float32, {backend}" for backend in available_backends()}


def cases_of(file: str) -> list[dict]:
    return json.loads((VECTORS / file).read_text())


def test_the_command_counts(capsys):
    assert main(["vectors", str(VECTORS), "--backend", "reference"]) == 0
    expected = 2 * sum(len(cases_of(file.name)) for file in VECTORS.glob("*.json"))
    assert capsys.readouterr().out == f"{expected} passed, 0 failed\n"


def test_a_failure_names_case_place_and_both_values(tmp_path, capsys):
    case = cases_of("normalize.json")[0]
    case["expected"]["values"][2] += 1e-6
    (tmp_path / "wrong.json").write_text(json.dumps([case]))
    assert main(["vectors", str(tmp_path)]) == 1
    failure, summary = capsys.readouterr().out.splitlines()
    assert summary == "1 passed, 1 failed"  # 1e-6 is within what float32 is held to
    assert failure.startswith("grpo/binary [float64]: values[2]: found -0.86601040404")
    assert f"expected {case['expected']['values'][2]!r}" in failure


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "policy_los"}, "unknown kind 'policy_los'"),
        ({"config": {"loss": "ppo", "eps": 1}}, "ValueError: PolicyLossConfig: unknown key 'eps'"),
        ({"expected": {"loss": 0.0, "grad_logp": [0.0]}}, "loss: found"),
        ({"expected": {"loss": 0.0, "grad": [0.0]}}, "expected: found ['grad'], but policy_loss gives loss, grad_logp"),
        ({"expected": {}}, "expected: found nothing"),
    ],
)
def test_a_case_that_cannot_be_right_is_a_failure(tmp_path, capsys, change, message):
    (tmp_path / "wrong.json").write_text(json.dumps([{**cases_of("policy_loss.json")[0], **change}]))
    assert main(["vectors", str(tmp_path)]) == 1
    assert message in capsys.readouterr().out


def test_a_case_may_say_less(tmp_path):
    case = cases_of("policy_loss.json")[0]
    case["inputs"]["prox_logp"] = None
    del case["expected"]["loss"]
    (tmp_path / "less.json").write_text(json.dumps([case]))
    assert main(["vectors", str(tmp_path)]) == 0


def test_no_vectors_is_an_error(tmp_path, capsys):
    assert main(["vectors", str(tmp_path)]) == 2
    assert "no *.json files there" in capsys.readouterr().err
    (tmp_path / "broken.json").write_text("{")
    assert main(["vectors", str(tmp_path)]) == 2
    assert "not JSON" in capsys.readouterr().err
    (tmp_path / "broken.json").write_text('[{"name": "x"}]')
    assert main(["vectors", str(tmp_path)]) == 2
    assert "expected a list of cases" in capsys.readouterr().err


def test_an_unknown_backend_fails_its_cases(tmp_path, capsys):
    (tmp_path / "logits.json").write_text(json.dumps(cases_of("token_logprob.json")[:1]))
    assert main(["vectors", str(tmp_path), "--backend", "cup"]) == 1
    assert "unknown kernel back-end 'cup'" in capsys.readouterr().out
