"""Makes tests/ importable (truth.py) and keeps tests off the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
