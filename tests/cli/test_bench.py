"""`lineardiff bench` end to end on tiny sizes: tables, files, mistakes, an interruption."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lineardiff.bench import candidates as attention_candidates
from lineardiff.bench.rows import Row, read_rows
from lineardiff.cli import bench, main

TINY = ["--heads", "1", "--head-dim", "8", "--contrast-tokens", "4", "--seconds", "0.001", "--device", "cpu"]


@pytest.fixture(autouse=True)
def keep_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_quick_measures_everything_and_writes_three_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--quick", "--sizes", "16", "64", *TINY, "--threads", "1", "--output", str(tmp_path)]
    assert main(words) == 0
    rows = read_rows(tmp_path / "bench.csv")
    assert {(r.N, r.dtype, r.mode) for r in rows} == {
        (N, dtype, mode)
        for N in (16, 64)
        for dtype in ("float32", "bfloat16")
        for mode in ("forward", "train")
    }
    candidates = {r.candidate for r in rows}
    assert {"sdpa", "vca-portable"} <= candidates
    assert "vca-reference" not in candidates
    assert {r.status for r in rows if r.candidate in ("sdpa", "vca-portable")} == {"measured"}
    assert all(0 < r.low_ms <= r.ms <= r.high_ms for r in rows if r.ms is not None)
    about = json.loads((tmp_path / "bench.json").read_text())
    assert about["environment"]["threads"] == 1
    assert about["environment"]["versions"]["torch"] == torch.__version__.split("+")[0]
    assert about["settings"]["sizes"] == [16, 64]
    assert {at["candidate"] for at in about["crossovers"]} == candidates - {"sdpa"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "op, train, bfloat16" in out
    assert "faster than sdpa from N" in out
    assert f"written: {tmp_path / 'bench'}.csv" in out


def test_the_table_shows_what_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--sizes", "16", *TINY, "--dtypes", "float32", "--modes", "forward", "--pooling"]
    assert main([*words, "--backends", "reference", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("op, forward, float32  1, 1, 16, 8, 4  ")]
    with open(tmp_path / "bench.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["candidate"] for row in rows] == ["sdpa", "vca-reference", "vca-reference+pool"]
    for row, line in zip(rows, shown, strict=True):
        candidate, ms, quartiles, ratio, *_ = line.split()[8:]
        low, high = quartiles.split("-")
        assert candidate == row["candidate"]
        for name, cell in {"ms": ms, "low_ms": low, "high_ms": high, "ratio": ratio}.items():
            assert float(cell) == pytest.approx(float(row[name]), abs=0.01)
    assert any(line.startswith("no plot: a plot over N needs times at two N") for line in lines)
    assert not (tmp_path / "bench.png").exists()


def test_what_is_not_measured_says_so_in_the_table() -> None:
    from lineardiff.bench.table import crossover_table, speed_table

    measured = Row(
        "op", "train", "float32", 1, 1, 1024, 8, 4, "sdpa", "measured", ms=100.0, low_ms=99.0, high_ms=125.0
    )
    far = replace(measured, N=4096, status="extrapolated", ms=1600.0, low_ms=None, high_ms=None)
    fast = replace(far, candidate="x", status="measured", ms=16.0, ratio=100.0, ratio_status="extrapolated")
    left_out = replace(far, candidate="y", status="not run: out of time", ms=None)
    _, _, *lines, legend = speed_table([measured, far, fast, left_out]).splitlines()
    assert [line.split()[8:] for line in lines] == [
        ["sdpa", "100.0", "99.00-125.0", "-", "-"],
        ["sdpa", "~1600.0", "-", "-", "-"],
        ["x", "16.00", "-", "~100.00", "-"],
        ["y", "-", "-", "-", "-", "not", "run:", "out", "of", "time"],
    ]
    assert legend == "~ from a time that is extrapolated with N^2, not measured"
    assert crossover_table([measured, fast]) == ""  # they share no N


def test_layers_with_the_peers_that_are_installed_the_others_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {peer.name: peer for peer in attention_candidates.PEERS}
    missing = found["nystrom"]._replace(module="no_such_module")
    peers = (found["agent"], found["diff"], missing, found["performer"]._replace(module="nor_this_one"))
    monkeypatch.setattr(attention_candidates, "PEERS", peers)
    words = ["bench", "--level", "layer", "--sizes", "16", *TINY, "--dtypes", "float32", "--modes", "forward"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    said = 'left out, for they are not installed: nystrom-attention, performer-pytorch; pip install "lineardiff[bench]"'
    assert capsys.readouterr().out.count(said) == 1
    rows = read_rows(tmp_path / "bench.csv")
    assert [r.candidate for r in rows if not r.candidate.startswith("vca-")] == ["sdpa", "agent", "diff"]
    assert main([*words, "--peers", "nystrom"]) == 2
    assert capsys.readouterr().err == (
        "lineardiff: error: peer 'nystrom' is not installed; pip install nystrom-attention\n"
    )


def test_an_interruption_keeps_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lineardiff.bench import attention

    row = Row("op", "forward", "float32", 1, 1, 16, 8, 4, "sdpa", "measured", ms=2.5)

    def interrupted(*words: object, **options: object) -> Iterator[list[Row]]:
        yield [row]
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "measure_attention", interrupted)
    assert main(["bench", "--sizes", "16", "64", *TINY, "--output", str(tmp_path)]) == 130
    assert read_rows(tmp_path / "bench.csv") == [row]
    assert json.loads((tmp_path / "bench.json").read_text())["crossovers"] == []
    out, err = capsys.readouterr()
    assert "sdpa       2.50" in out
    kept = f"what was measured so far (1 rows) is in {tmp_path / 'bench'}.csv"
    assert err.splitlines()[-1] == f"lineardiff: interrupted; {kept}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backends", "portible"], "there is no backend 'portible'; did you mean portable?"),
        (["--level", "layer", "--peers", "agnet"], "there is no peer 'agnet'; did you mean agent?"),
        (["--peers", "agent"], "the peers are layers, which project x themselves: add --level layer"),
        (["--pooling", "--level", "layer"], "a layer always pools"),
        (["--heads", "0"], "--heads is 0; it must be positive"),
        (["--sizes", "49", "0"], "--sizes holds 0"),
        (["--device", "cuda:99"], "device 'cuda:99' is not available"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words, "--output", str(tmp_path / "bench")]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "bench").exists()


def test_a_backend_that_cannot_run_here_gives_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lineardiff import ops

    unable = ops.Backend("unable", lambda inputs: inputs.q, lambda inputs: "needs a GPU of tomorrow", "fast")
    monkeypatch.setattr(ops, "BACKENDS", (*ops.BACKENDS, unable))
    assert main(["bench", "--backends", "unable"]) == 2
    assert "backend 'unable' cannot run here: needs a GPU of tomorrow" in capsys.readouterr().err
    assert "unable" not in bench._backends(None, quick=False)
