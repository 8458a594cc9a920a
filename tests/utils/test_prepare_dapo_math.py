import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.conftest import CHAT_TEMPLATE, make_tokenizer
from unirl.config.schema import DataConfig
from unirl.data import load_prompts
from unirl.utils.prepare_dapo_math import BOXED_INSTRUCTION, PUBLISHED_PREAMBLE, PUBLISHED_SUFFIX, main

ROOT = Path(__file__).parents[2]


def published(problem, answer, index, source="math_dapo"):
    """A row as BytedTsinghua-SIA publishes them."""
    return {
        "data_source": source,
        "prompt": [{"content": f"{PUBLISHED_PREAMBLE}{problem}{PUBLISHED_SUFFIX}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def write_parquet(path, rows, row_group_size=7):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=row_group_size)
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def sources(tmp_path):
    """Small files in the published schemas: 5 training problems 20 times, AIME 2024 32 times, AIME 2025 once."""
    train = [published(f"What is {i}+1 in $\\mathbb{{Z}}$ 数?", str(i + 1), f"id-{i}") for i in range(5)] * 20
    aime24 = [published(f"AIME 24 number {i}.", str(i), i) for i in range(30)] * 32
    aime25 = [{"problem": f"AIME 25 number {i}.", "answer": f"{i:03}", "id": str(i)} for i in range(30)]
    return {
        "train": write_parquet(tmp_path / "dapo-math-17k.parquet", train),
        "aime24": write_parquet(tmp_path / "aime-2024.parquet", aime24),
        "aime25": write_parquet(tmp_path / "aime25.parquet", aime25),
    }


@pytest.fixture
def prepare(sources, tmp_path, monkeypatch, capsys):
    """Runs the command on `sources`, some replaced by keyword; returns its status, stdout and stderr."""

    def run(*flags, out_dir=tmp_path / "out", **changed):
        argv = ["prepare_dapo_math", "--out-dir", str(out_dir), *flags]
        for name, paths in {**sources, **changed}.items():
            argv += [f"--{name}", *map(str, paths if isinstance(paths, list) else [paths])]
        monkeypatch.setattr(sys, "argv", argv)
        status = main()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_the_command_writes_each_problem_once(sources, tmp_path):
    out_dir = tmp_path / "new" / "dapo_math"
    command = [sys.executable, "-m", "unirl.utils.prepare_dapo_math", "--out-dir", str(out_dir)]
    for name, path in sources.items():
        command += [f"--{name}", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert "DAPO-Math: 5 problems from 100 rows" in done.stdout
    assert "AIME 2024: 30 problems from 960 rows" in done.stdout
    assert "warning" not in done.stdout
    train = read(out_dir / "train.jsonl")
    assert train[1] == {
        "prompt": "What is 1+1 in $\\mathbb{Z}$ 数?" + BOXED_INSTRUCTION,
        "answer": "2",
        "data_source": "math_dapo",
        "index": "id-1",
    }
    aime = read(out_dir / "aime_eval.jsonl")
    assert [line["data_source"] for line in aime] == ["aime24"] * 30 + ["aime25"] * 30
    assert aime[3] == {
        "prompt": "AIME 24 number 3." + BOXED_INSTRUCTION,
        "answer": "3",
        "data_source": "aime24",
        "index": 3,
    }
    assert aime[33] == {"prompt": "AIME 25 number 3." + BOXED_INSTRUCTION, "answer": "3", "data_source": "aime25"}
    assert sorted(path.name for path in out_dir.iterdir()) == ["aime_eval.jsonl", "train.jsonl"]


def test_keep_instruction_leaves_prompts_as_published(prepare, tmp_path):
    assert prepare("--keep-instruction")[0] == 0
    assert read(tmp_path / "out" / "train.jsonl")[0]["prompt"].startswith(PUBLISHED_PREAMBLE)
    assert read(tmp_path / "out" / "train.jsonl")[0]["prompt"].endswith(PUBLISHED_SUFFIX)
    assert read(tmp_path / "out" / "aime_eval.jsonl")[30]["prompt"] == "AIME 25 number 0."


def test_rows_that_repeat_conflict_or_leak_are_reported(prepare, tmp_path):
    rows = [
        published("kept", "1", "a"),
        published(" kept\n", "1", "b"),  # another index, the same problem
        published("two answers", "1", "c"),
        published("two answers", "2", "c"),
        published("AIME 25 number 4.", "4", "d"),
        published("no answer", "", "e"),
        published("other instruction", "3", "f") | {"prompt": [{"role": "user", "content": "x? End with Answer: x"}]},
        published("chat", "3", "g") | {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    ]
    status, out, _ = prepare(train=write_parquet(tmp_path / "rows.parquet", rows))
    assert status == 0
    assert [line["index"] for line in read(tmp_path / "out" / "train.jsonl")] == ["a", "f"]
    assert "DAPO-Math: 2 problems from 8 rows" in out
    assert "1 problems dropped: rows give them different answers" in out
    assert "1 problems dropped: they are evaluation problems" in out
    assert '1 problems say "Answer:"' in out
    assert "rows.parquet row 6: the answer is empty" in out
    assert "rows.parquet row 8: prompt must be one user message" in out


def test_other_common_schemas_and_several_files(prepare, tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text(
        '{"Problem": "P", "Answer": 70}\n\nnot json\n{"question": "Q", "answer": 7.0}\n'
        '{"prompt": "R", "solution": "no", "reward_model": {"ground_truth": "5"}}\n{"text": "?"}\n'
    )
    more = write_parquet(tmp_path / "b.parquet", [{"problem": "P", "answer": "70", "solution": "..."}])
    status, out, _ = prepare(train=[lines, more])
    assert status == 0
    written = [
        (line["prompt"].removesuffix(BOXED_INSTRUCTION), line["answer"]) for line in read(tmp_path / "out/train.jsonl")
    ]
    assert written == [("P", "70"), ("Q", "7"), ("R", "5")]
    assert "a.jsonl line 3: not an object" in out
    assert "a.jsonl line 6: no problem in the columns text; expected prompt and reward_model" in out


@pytest.mark.parametrize(
    ("published_answer", "written"), [("033", "33"), ("0", "0"), (204, "204"), ("336^\\circ", "336")]
)
def test_aime_answers_are_plain_integers(prepare, tmp_path, published_answer, written):
    rows = [{"problem": "one", "answer": published_answer}]
    status, out, _ = prepare(aime25=write_parquet(tmp_path / "one.parquet", rows))
    assert status == 0
    assert read(tmp_path / "out" / "aime_eval.jsonl")[-1]["answer"] == written
    assert "warning: AIME 2025 has 30 problems, found 1" in out


def test_the_hub_out_of_reach_is_one_error_that_names_the_options(sources, tmp_path):
    command = [sys.executable, "-m", "unirl.utils.prepare_dapo_math", "--out-dir", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [*command, "--aime24", str(sources["aime24"])], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "cannot read math-ai/aime25 from the Hugging Face hub" in done.stderr
    assert "--aime25 FILE..." in done.stderr
    assert not (tmp_path / "out").exists()


def test_errors_leave_the_last_good_files_alone(prepare, tmp_path):
    assert prepare()[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 torn")
    (tmp_path / "table.csv").write_text("a,b")
    bad = {
        "torn.parquet": "not a parquet file",
        "missing.parquet": "No such file",
        "missing.jsonl": "No such file",
        "table.csv": "expected a .parquet, .jsonl or .json file",
    }
    for name, message in bad.items():
        status, _, err = prepare(train=tmp_path / name)
        assert status == 2
        assert message in err
        assert name in err
    unknown = write_parquet(tmp_path / "unknown.parquet", [{"text": "a", "label": 1}])
    assert "none of its columns is known: text, label" in prepare(train=unknown)[2]
    empty = write_parquet(tmp_path / "empty.parquet", [published("p", "", 1)])
    assert "no problem is left" in prepare(train=empty)[2]
    leak = write_parquet(tmp_path / "leak.parquet", [published("AIME 24 number 1.", "1", 1)])
    assert "all of --train are evaluation problems" in prepare(train=leak)[2]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_an_output_folder_that_cannot_be_written_is_named(prepare, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, err = prepare(out_dir=tmp_path / "file")
    assert status == 2
    assert "--out-dir" in err


def test_the_files_are_what_load_prompts_reads(prepare, tmp_path):
    assert prepare()[0] == 0
    tokenizer = make_tokenizer(CHAT_TEMPLATE)
    train = load_prompts(DataConfig(path=str(tmp_path / "out/train.jsonl")), tokenizer, split="train")
    heldout = load_prompts(DataConfig(), tokenizer, split="heldout", path=str(tmp_path / "out/aime_eval.jsonl"))
    assert (len(train), len(heldout)) == (5, 60)
    assert not train.report.bad_lines + heldout.report.bad_lines
    assert "\\boxed{}" in tokenizer.decode(train[0].token_ids)
