"""Entry point of the `lineardiff` command, which answers `--help` and `--version` without importing torch.

`import lineardiff` registers its models with timm and therefore imports torch and timm, which takes seconds. The
command puts the package into `sys.modules` without running its `__init__`, so that the modules of `lineardiff.cli` can
be imported, and runs the `__init__` as soon as the arguments are known to be valid.
"""

import importlib.util
import sys


def main() -> int:
    """Run the command line and return its exit code."""
    spec = importlib.util.find_spec("lineardiff")
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["lineardiff"] = package

    from lineardiff import cli

    loader = spec.loader
    cli.import_library = lambda: loader.exec_module(package)
    return cli.main()
