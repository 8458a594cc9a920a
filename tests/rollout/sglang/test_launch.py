"""Command line and environment of a server; no SGLang needed."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from unirl.errors import UserError
from unirl.rollout.sglang import ServerOptions, find_python, per_server
from unirl.rollout.sglang.launch import command_line, environment

CPU = ServerOptions("python3", "some/model", "float32", Path("logs/sglang.log"))
CUDA = ServerOptions(
    "python3",
    "some/model",
    "bfloat16",
    Path("logs/sglang.log"),
    device="cuda",
    tp=2,
    gpus=(0, 1, 2, 3),
    mem_fraction=0.8,
)


def arguments(options: ServerOptions) -> list[str]:
    return command_line(options, 30000, Path("key.yaml"))


def value(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_cpu_command():
    command = arguments(CPU)
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    assert value(command, "--host") == "127.0.0.1"
    assert value(command, "--device") == "cpu"
    assert value(command, "--attention-backend") == "torch_native"
    assert value(command, "--mem-fraction-static") == "0.3"
    assert "--enable-deterministic-inference" in command
    assert "--trust-remote-code" not in command
    assert not any("api-key" in part for part in command)


def test_cuda_command():
    command = arguments(CUDA)
    assert (value(command, "--tp-size"), value(command, "--mem-fraction-static")) == ("2", "0.8")
    assert "--attention-backend" not in command
    assert "--mem-fraction-static" not in arguments(ServerOptions("p", "m", "bfloat16", Path("log"), device="cuda"))


def test_given_arguments_replace_and_add():
    given = {
        "dtype": "half",
        "stream_interval": 64,
        "disable_radix_cache": True,
        "skip_server_warmup": False,
        "x": [1, 2],
    }
    command = arguments(ServerOptions("p", "m", "float32", Path("log"), arguments=given))
    assert (value(command, "--dtype"), value(command, "--stream-interval")) == ("half", "64")
    assert command.count("--dtype") == 1
    assert "--disable-radix-cache" in command
    assert "--skip-server-warmup" not in command
    assert command[command.index("--x") : command.index("--x") + 3] == ["--x", "1", "2"]


def test_the_trainers_environment_does_not_leak(monkeypatch, tmp_path):
    for name in ("PYTHONPATH", "RANK", "MASTER_PORT", "VIRTUAL_ENV"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    cpu = environment(CPU)
    assert not {"RANK", "MASTER_PORT", "VIRTUAL_ENV"} & cpu.keys()
    assert cpu["no_proxy"] == "example.org,127.0.0.1,localhost"
    assert (Path(cpu["PYTHONPATH"]) / "sgl_kernel" / "__init__.py").is_file()
    assert "HF_HUB_OFFLINE" not in cpu
    assert environment(ServerOptions("p", str(tmp_path), "float32", Path("log")))["HF_HUB_OFFLINE"] == "1"
    cuda = environment(CUDA)
    assert "PYTHONPATH" not in cuda
    assert cuda["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"


def test_servers_share_no_device_and_no_log():
    first, second = per_server(CUDA, 2)
    assert (first.gpus, second.gpus) == ((0, 1), (2, 3))
    assert (first.log_path.name, second.log_path.name) == ("sglang_0.log", "sglang_1.log")


def test_finding_the_interpreter(monkeypatch, tmp_path):
    monkeypatch.delenv("UNIRL_SGLANG_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^\.venv-sglang/bin/python: no such interpreter.* `make sglang`"):
        find_python(None)
    with pytest.raises(UserError, match=r"^rollout\.python=nowhere: no such interpreter"):
        find_python("nowhere")
    monkeypatch.setenv("UNIRL_SGLANG_PYTHON", sys.executable)
    assert find_python(None) == sys.executable
    link = tmp_path / ".venv-sglang" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(sys.executable)
    monkeypatch.delenv("UNIRL_SGLANG_PYTHON")
    assert find_python(None) == str(link), "not resolved: the place of the link makes the environment"


def test_ranks_on_cpu_are_given_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 4, 5})
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in environment(CPU)
    assert environment(replace(CPU, tp=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "2|4"
    assert environment(replace(CPU, tp=2, num_threads=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "2,4|5,2"
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0-3|4-7")
    assert environment(replace(CPU, tp=2))["SGLANG_CPU_OMP_THREADS_BIND"] == "0-3|4-7"
