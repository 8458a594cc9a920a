"""nvcc and NVIDIA's binary tools: from the machine, from their Python packages, or those that triton brings along."""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONS = ROOT / "csrc" / "cuda" / "nvcc.options"
"""Flags of the shipped kernels, which setup.py uses, too."""


class MissingTool(RuntimeError):
    """A program that is needed is nowhere; the message says how to get it."""


@cache
def tool(name: str) -> Path:
    """nvcc, nvdisasm or cuobjdump. Raises MissingTool."""
    for folder in _folders():
        if found := shutil.which(name, path=str(folder)):
            return Path(found)
    raise MissingTool(
        f"{name} is neither on PATH, nor in CUDA_HOME/bin, nor in an installed package: "
        "pip install -r requirements/test.txt brings it"
    )


def compiler_version() -> str:
    """As in 'nvcc-13.0.88'."""
    return "nvcc-" + re.search(r"V(\d+\.\d+\.\d+)", _run([tool("nvcc"), "--version"])).group(1)


def compile_cubin(source: Path, arch: str, output: Path) -> None:
    """Machine code of a .cu file of this repository for sm_90a or sm_100a."""
    _run([tool("nvcc"), "--options-file", OPTIONS, f"-arch={arch}", "-cubin", "-o", output, source])


def run_host_program(source: Path, folder: Path, *arguments: str) -> str:
    """What the host part of a .cu file prints; needs no GPU as long as it launches nothing."""
    program = folder / source.stem
    packaged = tool("nvcc").parent.parent / "lib"  # where the Python packages have the runtime, unlike toolkits
    _run([tool("nvcc"), "--options-file", OPTIONS, "-arch=sm_90a", "-o", program, source, f"-L{packaged}"])
    return _run([program, *arguments])


def disassembly(cubin: Path) -> str:
    return _run([tool("nvdisasm"), "-c", cubin])


def resource_usage(cubin: Path) -> str:
    return _run([tool("cuobjdump"), "--dump-resource-usage", cubin])


def _folders() -> Iterator[Path]:
    yield from (Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep))
    if home := os.environ.get("CUDA_HOME"):
        yield Path(home, "bin")
    for package, inside in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        for place in spec.submodule_search_locations or () if spec else ():
            yield Path(place, inside)


def _run(command: list[str | Path]) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(str(word) for word in command)}\n{done.stdout}{done.stderr}")
    return done.stdout
