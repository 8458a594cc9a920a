"""The launch helper: what it shows is what it runs."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import unirl
from unirl.demo.arith import make_base_model
from unirl.launch.__main__ import main

ROOT = Path(unirl.__file__).parents[1]
TINY = "--config-name=ar/arith_drpo_tiny_cpu"
FLAGSHIP = "--config-name=ar/qwen3_drpo_4b_base_dapo_sglang"


@pytest.fixture
def shown(capsys):
    """`shown(*arguments)`: the words of the command, and the script, that --print shows."""

    def show(*arguments: str) -> tuple[list[str], str]:
        assert main([*arguments, "--print"]) == 0
        output = capsys.readouterr().out
        lines = [line for line in output.splitlines() if not line.startswith("# a run is refused")]
        return shlex.split(lines[0]), "\n".join(lines[1:])

    return show


def script_in(words: list[str]) -> str:
    [path] = [word for word in words if word.endswith(".sbatch")]
    return Path(path).stem


def test_shows_the_submission_and_the_script(shown):
    words, script = shown("slurm", FLAGSHIP, "optimizer.lr=2e-6", "--partition=gpu", "--time=2-00:00:00")
    path = ROOT / "examples" / "slurm" / "train_ar.sbatch"
    assert words == [
        *(f"UNIRL_ROOT={ROOT}", f"UNIRL_PYTHON={sys.executable}"),
        *("sbatch", "--nodes=8", "--gpus-per-node=8", "--partition=gpu", "--time=2-00:00:00", str(path)),
        *("ar/qwen3_drpo_4b_base_dapo_sglang", "optimizer.lr=2e-6"),
    ]
    assert script.endswith(path.read_text().rstrip("\n"))


@pytest.mark.parametrize(
    ("overrides", "template", "options"),
    [
        (["num_devices=8"], "train_ar_single_node", ["--nodes=1", "--gpus-per-node=8"]),
        (["num_devices=2"], "train_ar_single_node", ["--nodes=1", "--gpus-per-node=2"]),
        (["num_devices=16"], "train_ar", ["--nodes=2", "--gpus-per-node=8"]),
        (["num_devices=16", "devices_per_node=4"], "train_ar", ["--nodes=4", "--gpus-per-node=4"]),
        (["--template=train_ar_requeue"], "train_ar_requeue", ["--nodes=8", "--gpus-per-node=8"]),
        (
            ["cluster.layout=split", "rollout.num_devices=32"],
            "train_ar_separate_rollout",
            ["--nodes=8", "--gpus-per-node=8"],
        ),
        (
            ["cluster.layout=split", "rollout.num_devices=32", "--template=train_ar_heterogeneous", "--account=me"],
            "train_ar_heterogeneous",
            ["--nodes=4", "--gpus-per-node=8", "--account=me", ":", "--nodes=4", "--gpus-per-node=8", "--account=me"],
        ),
    ],
)
def test_the_config_decides_script_and_size(shown, overrides, template, options):
    words, _ = shown("slurm", FLAGSHIP, *overrides)
    start = words.index("sbatch") + 1
    assert words[start : start + len(options)] == options
    assert script_in(words) == template


def test_rollout_nodes_are_told_to_the_script(shown):
    words, _ = shown("slurm", FLAGSHIP, "cluster.layout=split", "rollout.num_devices=24", "batch_size=40")
    assert "UNIRL_ROLLOUT_NODES=3" in words


def test_folders_of_recipes_are_found_by_the_job_too(shown, tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    recipe = ROOT / "examples" / "ar" / "arith_drpo_tiny_cpu.yaml"
    (tmp_path / "configs" / "mine.yaml").write_text(recipe.read_text())
    monkeypatch.chdir(tmp_path)
    words, _ = shown("slurm", "--config-name", "mine", "--config-dir=configs")
    assert words[-2:] == ["mine", f"--config-dir={tmp_path / 'configs'}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected slurm or local"),
        (["slrum", TINY], "found 'slrum'"),
        (["slurm", TINY, "optimzer.lr=1"], "optimizer.lr"),
        (["slurm", TINY, "stack.num_updates_per_batch=7"], "num_updates_per_batch"),
        (["slurm", TINY, "--template=train_ar_requeu"], "the nearest is train_ar_requeue"),
        (["slurm", TINY, "-p"], "--partition=gpu rather than -p gpu"),
        (["slurm", FLAGSHIP, "num_devices=12", "batch_size=48"], "12 devices do not fill nodes"),
        (["slurm", FLAGSHIP, "--template=train_ar_single_node"], "needs 8 nodes"),
        (["slurm", FLAGSHIP, "--template=train_ar_heterogeneous"], "needs cluster.layout=split"),
        (["local", TINY, "--partition=gpu"], "local takes no option --partition=gpu"),
    ],
)
def test_mistakes_are_explained_before_anything_runs(arguments, message, capsys):
    assert main([*arguments, "--print"] if arguments else []) == 2
    assert message in capsys.readouterr().err


def test_a_machine_without_slurm_says_so(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["slurm", TINY]) == 2
    assert "sbatch is not on PATH" in capsys.readouterr().err


def test_local_runs_the_command_that_it_shows(shown, tmp_path):
    model = tmp_path / "model"
    make_base_model(str(model), careful_steps=3, lazy_steps=2)
    tiny = [f"model.path={model}", "model.maker=null", "batch_size=4", "data.heldout_size=8", "num_iterations=1"]
    arguments = ["local", TINY, *tiny, f"run_dir={tmp_path / 'run'}"]
    words, _ = shown(*arguments)
    assert words[1:3] == ["-m", "unirl.train_ar"]
    done = subprocess.run(
        [sys.executable, "-m", "unirl.launch", *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "run" / "policy") in done.stdout
