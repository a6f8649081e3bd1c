"""Compiles the CPU kernel (src/lineardiff/ops/csrc); everything else about the package is in pyproject.toml.

The kernel is optional. Where it cannot be built (not x86-64 Linux, no compiler, no torch to build against) the
package is installed without it and the reason goes to `_cpu_kernel.txt`, beside the place of the library.
LINEARDIFF_KERNEL=1 makes that an error, LINEARDIFF_KERNEL=0 builds nothing; CXX names another compiler.
"""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

LIBRARY = Path("lineardiff/ops/_cpu_kernel.so")
SOURCES = Path("src/lineardiff/ops/csrc")
OLDEST_TORCH = (2, 10)

# CFLAGS and CXXFLAGS are not read: a -march in them would put instructions into bindings.cpp that not every CPU has.
COMMON = "-std=c++20 -O3 -fPIC -fno-math-errno -fvisibility=hidden"
AVX512 = "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma -mprefer-vector-width=512"
FLAGS = {
    "bindings.cpp": f"-DTORCH_TARGET_VERSION=0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000ULL",
    "kernel_avx2.cpp": "-mavx2 -mfma",
    "kernel_avx512.cpp": AVX512,
    "kernel_avx512bf16.cpp": f"{AVX512} -mavx512bf16",
}


def find_torch() -> Path:
    """The folder of the torch to build against; its stable ABI makes the result fit every later torch.

    Looks into the environment that is installed into, too: pip hides it from an isolated build, and a torch
    downloaded for the build alone would be gigabytes.
    """
    places = [*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    found = next(iter(metadata.distributions(name="torch", path=places)), None)
    oldest = ".".join(map(str, OLDEST_TORCH))
    if found is None:
        raise CompileError(f"the build found no torch; install torch {oldest} or newer first")
    if tuple(map(int, re.findall(r"\d+", found.version)[:2])) < OLDEST_TORCH:
        raise CompileError(f"it needs torch {oldest} or newer; the build found torch {found.version}")
    folder = Path(str(found.locate_file("torch")))
    if not (folder / "include/torch/csrc/stable/library.h").exists():
        raise CompileError(f"the headers of torch {found.version} are not in {folder / 'include'}")
    return folder


def call(command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise CompileError(f"no C++ compiler: {command[0]}: {error.strerror}; CXX names another") from None
    print(done.stdout, end="", flush=True)
    if done.returncode:
        lines = done.stdout.splitlines()
        why = next((x.strip() for x in lines if "error" in x), f"exit status {done.returncode}")
        raise CompileError(f"{command[0]} failed: {why}")


def compile_kernel(library: Path, objects: Path) -> None:
    """Compile every source with its own flags, in parallel, and link them."""
    if sysconfig.get_platform() != "linux-x86_64":
        raise CompileError(f"it is written for x86-64 Linux; this is {sysconfig.get_platform()}")
    torch = find_torch()
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    library.parent.mkdir(parents=True, exist_ok=True)
    objects.mkdir(parents=True, exist_ok=True)

    def compile_one(source: str) -> str:
        target = str(objects / source) + ".o"
        flags = [*COMMON.split(), *FLAGS[source].split(), "-isystem", f"{torch}/include"]
        call([*compiler, *flags, "-c", str(SOURCES / source), "-o", target])
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        compiled = list(pool.map(compile_one, FLAGS))
    # No rpath: whoever loads the library has imported torch, and with it libtorch_cpu.so.
    torch_library = [f"-L{torch}/lib", "-ltorch_cpu"]
    call([*compiler, "-shared", *compiled, *torch_library, "-Wl,--no-undefined", "-o", str(library)])


class BuildKernel(build_ext):
    """One library that torch loads, no Python module: so it has no Python version in its name or its flags."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(LIBRARY)

    def run(self) -> None:
        wanted = os.environ.get("LINEARDIFF_KERNEL", "")
        if wanted not in ("", "0", "1"):
            raise CompileError(
                f"LINEARDIFF_KERNEL={wanted!r}; 1 builds the CPU kernel or fails, 0 builds none"
            )
        library = (Path("src") if self.inplace else Path(self.build_lib)) / LIBRARY
        reason = library.with_suffix(".txt")
        library.unlink(missing_ok=True)
        reason.unlink(missing_ok=True)
        try:
            if wanted == "0":
                raise CompileError("LINEARDIFF_KERNEL was 0")
            compile_kernel(library, Path(self.build_temp))
        except CompileError as error:
            if wanted == "1":
                raise
            reason.parent.mkdir(parents=True, exist_ok=True)
            reason.write_text(f"{error}\n")
            self.warn(f"lineardiff is installed without its CPU kernel: {error}")


class Wheel(bdist_wheel):
    """One wheel serves every Python; without the kernel, every machine too."""

    def get_tag(self) -> tuple[str, str, str]:
        build = self.get_finalized_command("build_ext")
        self.root_is_pure = not (Path(build.build_lib) / LIBRARY).exists()
        return "py3", "none", super().get_tag()[2]


setup(
    # The extension is here for the source distribution and for `build` to call build_ext.
    ext_modules=[
        Extension(
            str(LIBRARY.with_suffix("")).replace("/", "."),
            sources=[str(SOURCES / name) for name in FLAGS],
            depends=sorted(map(str, SOURCES.glob("*.h"))),
        )
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": Wheel},
)
