"""`python -m lineardiff` is `lineardiff`, for launchers such as torchrun."""

from lineardiff.cli import main

raise SystemExit(main())
