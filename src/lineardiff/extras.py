"""Optional dependencies: the command that installs those of an extra.

lineardiff is on no package index, so its extras cannot be installed by name. The requirements of an extra are on
one, whether lineardiff was installed from a clone or from a wheel: they are read from its own metadata.
"""

import shlex
import shutil
import sys
from pathlib import Path

__all__ = ["MissingExtra", "install_command", "missing_extra"]


class MissingExtra(ImportError):
    """An optional dependency is not installed; the message says how to install it."""


def missing_extra(extra: str, *, package: str) -> MissingExtra:
    """Return the exception to raise where `import package` failed.

    Args:
        extra: Extra of `pyproject.toml` that the package belongs to, for example "generate".
        package: Name of the package that could not be imported.
    """
    message = f"{package} is not installed; run: {install_command(extra, package=package)}"
    return MissingExtra(message, name=package)


def install_command(extra: str, *, package: str) -> str:
    """Return the shell command that installs what is missing of an extra into the running environment.

    Args:
        extra: Extra of `pyproject.toml`.
        package: Package to install where lineardiff's metadata are not available, as in a source tree on PYTHONPATH.
    """
    missing = [requirement for requirement in _requirements(extra) if not _is_installed(requirement)]
    return f"{_pip()} install {' '.join(map(shlex.quote, missing or [package.replace('_', '-')]))}"


def _requirements(extra: str) -> list[str]:
    """Return the requirements of an extra and of the extras it includes, without markers."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        declared = [Requirement(line) for line in metadata.requires("lineardiff") or []]
    except metadata.PackageNotFoundError:
        return []
    found: list[str] = []
    for requirement in declared:
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}) or not marker.evaluate({"extra": extra}):
            continue
        if requirement.name == "lineardiff":
            found += [line for included in requirement.extras for line in _requirements(included)]
        else:
            requirement.marker = None
            found.append(str(requirement))
    return sorted(set(found))


def _is_installed(line: str) -> bool:
    from importlib import metadata  # here, as in _requirements, to keep `lineardiff --help` fast

    from packaging.requirements import Requirement

    requirement = Requirement(line)
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def _pip() -> str:
    """Return `pip`, or the running interpreter's pip where the one on PATH belongs to another environment."""
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == Path(sys.executable).parent:
        return "pip"
    return f"{shlex.quote(sys.executable)} -m pip"
