"""Run timm's own model tests on the models of this library: tests/timm_suite/run.py [pytest arguments]

The tests come from the source distribution of the installed timm, fetched once with pip into .cache/. Where
timm's continuous integration skips a test (load_pretrained, fx with TorchScript), the variable it looks at is
unset. test_model_load_pretrained has no case, as no weights are published yet. Left out for time, being the same code
as smaller models: the pruning contract of the base ViTs (two minutes), and, of the larger PVT, Swin and CSwin, all
but the configuration tests.
"""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import timm

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache"


def fetch() -> Path:
    """The folder with timm's tests/, without timm/ beside it, which would hide the installed package."""
    suite = CACHE / f"timm-{timm.__version__}-suite"
    if suite.is_dir():
        return suite
    CACHE.mkdir(exist_ok=True)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary",
        "timm",
        "--dest",
        str(CACHE),
    ]
    subprocess.run([*pip, f"timm=={timm.__version__}"], check=True)
    root = f"timm-{timm.__version__}"
    partial = CACHE / f"{root}-partial"
    shutil.rmtree(partial, ignore_errors=True)
    with tarfile.open(CACHE / f"{root}.tar.gz") as archive:
        archive.extractall(partial, filter="data")
    shutil.rmtree(partial / root / "timm")
    (partial / root).rename(suite)
    shutil.rmtree(partial)
    return suite


def main(arguments: list[str]) -> int:
    suite = fetch()
    env = {name: value for name, value in os.environ.items() if name != "GITHUB_ACTIONS"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), env.get("PYTHONPATH")]))
    env["HF_HUB_OFFLINE"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "lineardiff_only",
        "-p",
        "no:cacheprovider",
        "-q",
        "-W",
        "ignore",
    ]
    larger = "(pvt or swin) and (small or medium or base or large)"
    chosen = f"not (prune_intermediate and base) and not ({larger} and not default_cfgs)"
    command += ["-n", "2", "-k", chosen]
    return subprocess.run([*command, "tests/test_models.py", *arguments], cwd=suite, env=env).returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
