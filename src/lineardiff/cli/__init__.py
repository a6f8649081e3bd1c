"""The command line: ``lineardiff train | evaluate | sample | ...``, one file per command."""

import importlib
import logging
import sys
from collections.abc import Sequence

from lineardiff.cli.errors import exit_code
from lineardiff.suggest import suggest

COMMANDS = {
    "train": "train a recipe; a run folder that exists is continued",
    "evaluate": "top-1, top-5 and loss of a run folder or of a checkpoint",
    "sample": "images of a trained DiT or SiT, for a look or for FID",
    "latents": "encode images once, to train generators on their latents",
    "models": "the models of lineardiff, with their size and cost",
    "info": "versions, devices, and which attention backends can run here",
    "bench": "how fast attention is on this machine: VCA's backends, self-attention, linear peers",
    "demo": "train a small ViT with MHSA and with VCA on embedded images, and compare them",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after ``lineardiff``; None takes those of the process.

    Returns:
        The exit code: 0 for success, 2 for bad input or an environment that cannot do it (one line on stderr
        says what and how to mend it; ``LINEARDIFF_DEBUG=1`` adds the traceback), 130 for an interruption.
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
            "lineardiff COMMAND --help lists the arguments of one command.",
        ]
    )
