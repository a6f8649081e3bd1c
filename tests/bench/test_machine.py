import json
import platform
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lineardiff.bench import describe_machine, machine
from lineardiff.bench.machine import cpu_name, machine_line, machine_table, memory_bytes


def test_what_is_recorded_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("torch", "no-such-package"))
    about = describe_machine()
    assert json.loads(json.dumps(about)) == about
    assert about["threads"] == torch.get_num_threads()
    assert about["capability"] == torch.backends.cpu.get_cpu_capability()
    assert about["versions"] == {
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "no-such-package": None,
    }
    line = machine_line(about)
    assert f"torch {metadata.version('torch')}" in line
    assert "no-such-package" not in line
    assert dict(machine_table(about))["threads"] == str(torch.get_num_threads())


def test_the_name_of_the_cpu_and_the_limit_of_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n",
        "/sys/fs/cgroup/memory.max": "4096\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda self: files[str(self)])
    assert cpu_name() == "Some CPU @ 2 GHz"
    assert memory_bytes() == 4096
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert (memory_bytes() or 0) > 2**28
