"""The CPU kernel stays within its memory: kernel_driver.cpp under AddressSanitizer, UndefinedBehaviorSanitizer and
valgrind. The driver compares every output with float64 loops too, and needs no PyTorch."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("kernel_driver.cpp")
SOURCES = Path(__file__).parents[2] / "src/lineardiff/ops/csrc"
COMPILER = shlex.split(os.environ.get("CXX") or "g++")
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

AVX512 = "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mfma"
FLAGS = {"avx2": "-mavx2 -mfma", "avx512": AVX512, "avx512bf16": f"{AVX512} -mavx512bf16"}
NEEDED = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512dq", "avx512vl", "avx512bw"},
    "avx512bf16": {"avx512_bf16"},
}

TENSORS = ["q", "k", "v", "pos", "neg", "gain1", "gain2", "out", "saved"]
GRADIENTS = ["grad", "dq", "dk", "dv", "dpos", "dneg", "sums"]
BUFFERS = ["head", "parts", "part", "scratch"]


def cpu_has(isa):
    return NEEDED[isa] <= set(Path("/proc/cpuinfo").read_text().split())


pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or os.uname().machine != "x86_64",
        reason="the kernel is for x86-64 Linux",
    ),
    pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason=f"{COMPILER[0]} is not installed"),
]


def compile_to(target, *arguments):
    done = subprocess.run(
        [*COMPILER, "-std=c++20", *map(str, arguments), "-o", target], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


def drive(*command):
    """Exit status and output; stderr, where the tools report, is part of it."""
    # the search for leaks needs ptrace, which a container may forbid; the kernel allocates nothing
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    done = subprocess.run(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def driver_object(tmp_path_factory):
    # without the sanitizers: what it does to memory is not the question, and it runs faster
    target = tmp_path_factory.mktemp("driver") / "driver.o"
    return compile_to(target, "-O2", "-g1", f"-I{SOURCES}", "-c", DRIVER)


@pytest.fixture(scope="module")
def build(tmp_path_factory, driver_object):
    """build(isa, *flags): the driver with the object of one instruction set, compiled once."""
    built = {}

    def build(isa, *flags):
        if not cpu_has(isa):
            pytest.skip(f"this CPU has no {isa}")
        key = (isa, *flags)
        if key not in built:
            folder = tmp_path_factory.mktemp(isa)
            source = SOURCES / f"kernel_{isa}.cpp"
            kernel = compile_to(folder / "kernel.o", "-g1", *FLAGS[isa].split(), *flags, "-c", source)
            built[key] = compile_to(folder / "driver", *flags, driver_object, kernel)
        return built[key]

    return build


@pytest.fixture(scope="module")
def sanitizers(tmp_path_factory):
    """The flags of both sanitizers, which a compiler may lack the libraries of."""
    folder = tmp_path_factory.mktemp("sanitizers")
    (folder / "empty.cpp").write_text("int main() {}\n")
    try:
        compile_to(folder / "empty", *SANITIZERS, folder / "empty.cpp")
    except AssertionError as error:
        pytest.skip(f"{COMPILER[0]} has no AddressSanitizer here: {error}")
    return SANITIZERS


# -O0 compiles faster than -O1, and leaves every access that the source makes to be seen.
@pytest.mark.parametrize("isa", FLAGS)
def test_sanitizers_find_nothing(isa, build, sanitizers):
    status, output = drive(build(isa, "-O0", *sanitizers), isa)
    assert status == 0, output
    assert int(output.splitlines()[-1].split()[0]) > 100, output


def test_a_missing_element_is_found(build, sanitizers):
    """In each tensor and buffer, and in the kernel, not in the driver: the checks above can fail."""
    driver = build("avx2", "-O0", *sanitizers)
    for name in TENSORS + GRADIENTS + BUFFERS:
        status, output = drive(driver, "avx2", f"short={name}")
        assert status != 0, name
        assert "ERROR: AddressSanitizer" in output, (name, output)
        assert "lineardiff::avx2::" in output.split("located 0 bytes")[0], (name, output)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_valgrind_finds_nothing(build):
    """valgrind also detects branches and outputs that depend on uninitialised memory. It supports AVX2, not AVX-512."""
    driver = build("avx2", "-O1")
    status, output = drive("valgrind", "--quiet", "--error-exitcode=9", driver, "avx2", "every=13", "unset")
    assert status == 0, output
    assert int(output.splitlines()[-1].split()[0]) > 15, output
