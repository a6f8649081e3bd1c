"""The command line, `lineardiff train | evaluate | sample | ...`, one file per command.

The console script is `lineardiff_cli`, which imports this package before the library itself; a command's file imports
torch, timm and everything built on them inside the functions that use them.
"""

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence

from lineardiff.cli.errors import exit_code
from lineardiff.suggest import suggest

__all__ = ["COMMANDS", "import_library", "main"]

COMMANDS = {
    "train": "train a recipe, or resume its run",
    "evaluate": "top-1, top-5 and loss of a run folder or a checkpoint; FID of generated images",
    "sample": "draw images with a trained DiT or SiT",
    "latents": "encode images once, to train DiT and SiT on their latents",
    "models": "list the models of lineardiff with their size and cost",
    "info": "show versions, devices and the attention backends that can run here",
    "bench": "measure attention on this machine: VCA's backends, self-attention, linear attentions",
    "demo": "train a small ViT with self-attention and with VCA on embedded images, and compare them",
}

import_library: Callable[[], object] = lambda: None  # noqa: E731
"""Completes `import lineardiff` once the arguments of a command are valid; set by `lineardiff_cli`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Words after `lineardiff`; None takes those of the process.

    Returns:
        The exit code: 0 for success, 2 for bad input or an unsuitable environment (one line on stderr says what is
        wrong and how to fix it; `LINEARDIFF_DEBUG=1` adds the traceback), 130 for an interruption.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(name)s: %(message)s")
    logging.getLogger("lineardiff").setLevel(logging.INFO)
    return exit_code(lambda: _dispatch(words))


def _dispatch(words: list[str]) -> None:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return
    if words[0] == "--version":
        from lineardiff._version import __version__

        print(f"lineardiff {__version__}")
        return
    command, *arguments = words
    if command not in COMMANDS:
        raise ValueError(f"there is no command {command!r}; {suggest(command, COMMANDS)}")
    if os.environ.get("LINEARDIFF_BACKEND"):
        from lineardiff.ops.backends import check_environment

        check_environment()
    importlib.import_module(f"lineardiff.cli.{command}").run(arguments)


def _usage() -> str:
    lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lineardiff COMMAND [arguments]",
            "",
            "Visual-Contrast Attention: train, score and inspect vision transformers.",
            "",
            *lines,
            "",
            "lineardiff COMMAND --help lists the arguments of a command.",
        ]
    )
