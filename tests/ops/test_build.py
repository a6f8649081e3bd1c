"""The compiled CPU kernel keeps to the instructions that were asked for, and its absence is explained."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lineardiff import ops

ROOT = Path(__file__).parents[2]
LIBRARY = Path(ops.__file__).with_name("_cpu_kernel.so")
COMPILER = (os.environ.get("CXX") or "c++").split()

# The ISA of a function is the namespace that its mangled name begins with. Static initializers (_GLOBAL__sub_I_...)
# and std:: have none: they may run on every CPU.
OWNER = re.compile(r"_Z+N[KVr]*10lineardiff(?:4(avx2)|6(avx512)|10(avx512bf16))")
ALLOWED = {
    None: set(),
    "avx2": {"VEX"},
    "avx512": {"VEX", "EVEX"},
    "avx512bf16": {"VEX", "EVEX", "BF16"},
}
LEGACY_PREFIXES = {"26", "2e", "36", "3e", "64", "65", "66", "67", "f2", "f3", "f0"}

needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump is not installed")
needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason=f"the compiler {COMPILER[0]} is not installed"
)
needs_x86 = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.uname().machine != "x86_64",
    reason="the kernel is for x86-64 Linux",
)


def encoding(code, text):
    """VEX, EVEX, BF16 or None, from the bytes of an instruction: EVEX need not show in its registers."""
    head = next((byte for byte in code.split() if byte not in LEGACY_PREFIXES), "")
    if re.match(r"vdpbf16|vcvtne", text):
        return "BF16"
    if head == "62" or re.search(r"%k[0-7]\b", text):
        return "EVEX"
    return "VEX" if head in ("c4", "c5") else None


def leaks(binary):
    """Functions with instructions that their namespace does not allow, and how many functions each namespace has."""
    listing = subprocess.run(
        ["objdump", "--disassemble", "--wide", binary], check=True, capture_output=True, text=True
    ).stdout
    found, counts, function, owner = {}, dict.fromkeys(ALLOWED, 0), None, None
    for line in listing.splitlines():
        if start := re.match(r"[0-9a-f]+ <(.+)>:$", line):
            function = start[1]
            match = OWNER.match(function)
            owner = match[match.lastindex] if match else None
            counts[owner] += 1
        elif len(cells := line.split("\t")) == 3:
            kind = encoding(cells[1], cells[2])
            if kind is not None and kind not in ALLOWED[owner]:
                found.setdefault(function, f"{kind}: {cells[2].strip()}")
    return found, counts


def weak_functions(binary):
    """Functions of which the linker keeps one copy for everybody, whatever that copy was compiled for."""
    symbols = subprocess.run(["nm", binary], check=True, capture_output=True, text=True).stdout
    return [line.split()[-1] for line in symbols.splitlines() if line.split()[-2] == "W"]


def build(folder, **variables):
    """`setup.py build_ext` into a folder, in this Python's environment."""
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        f"--build-lib={folder}",
        f"--build-temp={folder}/objects",
    ]
    inherited = {key: value for key, value in os.environ.items() if key != "LINEARDIFF_KERNEL"}
    return subprocess.run(command, cwd=ROOT, env=inherited | variables, capture_output=True, text=True)


@needs_objdump
@pytest.mark.skipif(not LIBRARY.exists(), reason="the CPU kernel was not built here")
def test_installed_library_has_no_instruction_outside_its_namespace():
    found, counts = leaks(LIBRARY)
    assert found == {}
    assert min(counts.values()) > 0, counts  # nothing stripped, no namespace renamed


@needs_x86
@needs_compiler
@needs_objdump
def test_a_build_keeps_the_instruction_sets_apart_and_loads(tmp_path):
    # One test, since the compilation takes most of its time.
    done = build(tmp_path, LINEARDIFF_KERNEL="1")
    assert done.returncode == 0, done.stdout + done.stderr

    objects = sorted((tmp_path / "objects").glob("kernel_*.o"))
    assert {path.name: weak_functions(path) for path in objects} == {
        "kernel_avx2.cpp.o": [],
        "kernel_avx512.cpp.o": [],
        "kernel_avx512bf16.cpp.o": [],
    }
    library = tmp_path / "lineardiff/ops/_cpu_kernel.so"
    found, counts = leaks(library)
    assert found == {}
    assert min(counts.values()) > 0, counts

    # in a separate process: two libraries cannot define the same ops
    code = (
        f"import torch; torch.ops.load_library({str(library)!r}); print(torch.ops.lineardiff.kernel_isa(''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("", "AVX2", "AVX-512", "AVX-512 with bfloat16")


LEAKY = """
#include <immintrin.h>
namespace shared {
template <class T> __attribute__((noinline)) void twice(T* x) {  // weak: the linker keeps any object's copy
  _mm512_storeu_ps(x, _mm512_add_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(x)));
}
}
namespace lineardiff {
namespace avx512 {
static __attribute__((noinline)) void fill(float* x) { _mm512_storeu_ps(x, _mm512_set1_ps(*x)); }
void calls(float* x) { fill(x); shared::twice(x); }
void rounds(float* x, void* y) { *(__m256bh*)y = _mm512_cvtneps_pbh(_mm512_loadu_ps(x)); }
}
namespace avx512bf16 {
void rounds(float* x, void* y) { *(__m256bh*)y = _mm512_cvtneps_pbh(_mm512_loadu_ps(x)); }
}
namespace avx2 {
void adds(__m256* x) { *x = _mm256_add_ps(*x, *x); }
void mixes(__m128i* x) { *x = _mm_ternarylogic_epi32(x[0], x[1], x[2], 0x1e); }  // AVX-512 on xmm0
}
void front(float* x) { x[0] = x[0] * x[1] + x[2]; }
float volatile one = 1;
float start = one * one;  // computed when the library is loaded, on any CPU
}
"""


@needs_x86
@needs_compiler
@needs_objdump
def test_the_check_finds_leaks(tmp_path):
    source, binary = tmp_path / "leaky.cpp", tmp_path / "leaky.o"
    source.write_text(LEAKY)
    flags = ["-O2", "-mavx512f", "-mavx512vl", "-mavx512bf16"]
    subprocess.run([*COMPILER, *flags, "-c", source, "-o", binary], check=True)
    found, counts = leaks(binary)
    assert sorted(re.sub("_GLOBAL__sub_I.*", "initializer", name) for name in found) == [
        "_ZN10lineardiff4avx25mixesEPDv2_x",
        "_ZN10lineardiff5frontEPf",
        "_ZN10lineardiff6avx5126roundsEPfPv",
        "_ZN6shared5twiceIfEEvPT_",
        "initializer",
    ]
    assert counts == {None: 3, "avx2": 2, "avx512": 3, "avx512bf16": 1}
    assert weak_functions(binary) == ["_ZN6shared5twiceIfEEvPT_"]


@needs_x86
def test_without_a_compiler_the_reason_is_left_behind(tmp_path):
    ops_folder = tmp_path / "lineardiff/ops"
    ops_folder.mkdir(parents=True)
    (ops_folder / "_cpu_kernel.so").write_text("of an earlier build")
    done = build(tmp_path, CXX="/bin/false")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in ops_folder.iterdir()] == ["_cpu_kernel.txt"]
    reason = (ops_folder / "_cpu_kernel.txt").read_text()
    assert reason == "/bin/false failed: exit status 1\n"
    assert "without its CPU kernel" in done.stdout + done.stderr


@needs_x86
@pytest.mark.parametrize(
    ("compiler", "words"),
    [("/bin/false", "/bin/false failed"), ("/no/compiler", "no C++ compiler: /no/compiler")],
)
def test_a_kernel_that_was_asked_for_is_built_or_fails(tmp_path, compiler, words):
    done = build(tmp_path, CXX=compiler, LINEARDIFF_KERNEL="1")
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "lineardiff/ops").exists() or not list((tmp_path / "lineardiff/ops").iterdir())


def test_a_kernel_that_was_declined_is_not_built(tmp_path):
    assert build(tmp_path, LINEARDIFF_KERNEL="0").returncode == 0
    assert [path.name for path in (tmp_path / "lineardiff/ops").iterdir()] == ["_cpu_kernel.txt"]


def test_an_unknown_wish_is_refused(tmp_path):
    done = build(tmp_path, LINEARDIFF_KERNEL="yes")
    assert done.returncode != 0
    assert "LINEARDIFF_KERNEL='yes'" in done.stderr
