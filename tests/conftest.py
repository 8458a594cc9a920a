"""What every test shares: quiet numerics, and a full run where one is asked for."""

import importlib.util
import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

_left_out: list[str] = []


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory) -> Path:
    """The pretrained model as a Hugging Face folder, not to be changed; 20 s."""
    from unirl.demo import smollm2

    if not all(importlib.util.find_spec(name) for name in smollm2.PACKAGES):
        pytest.skip(f"needs the packages {', '.join(smollm2.PACKAGES)}")
    path = tmp_path_factory.mktemp("models") / "smollm2"
    smollm2.export(str(path))
    return path


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "gpu" not in report.keywords:
        _left_out.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With UNIRL_REQUIRE_ALL=1 a test that was left out for want of anything but a GPU is a failure."""
    if os.environ.get("UNIRL_REQUIRE_ALL") == "1" and _left_out and exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    if _left_out:
        terminalreporter.section("left out for want of a part")
        for nodeid in _left_out:
            terminalreporter.line(nodeid)
