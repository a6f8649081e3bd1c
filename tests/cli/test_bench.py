"""`lineardiff bench` end to end on tiny sizes: tables, files, mistakes, an interruption."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench_support import bench_row

from lineardiff import bench, ops
from lineardiff.bench import candidates, timing
from lineardiff.bench.report import crossover_table, record, speed_table
from lineardiff.bench.rows import Row
from lineardiff.cli import main

TINY = ["--heads", "1", "--head-dim", "8", "--contrast-tokens", "4", "--seconds", "0.001", "--device", "cpu"]


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(timing, "seconds_running", lambda: 0.0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def read(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("command", [[], ["op"]])
def test_quick_measures_the_op_and_writes_three_files(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", *command, "--quick", "--sizes", "16", "64", *TINY, "--threads", "1"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    rows = read(tmp_path / "op.csv")
    assert {(r["N"], r["dtype"], r["mode"]) for r in rows} == {
        (N, dtype, mode)
        for N in ("16", "64")
        for dtype in ("float32", "bfloat16")
        for mode in ("forward", "train")
    }
    names = {r["candidate"] for r in rows}
    assert {"sdpa", "vca-portable"} <= names
    assert "vca-reference" not in names
    assert {r["status"] for r in rows if r["candidate"] in ("sdpa", "vca-portable")} == {"measured"}
    for row in rows:
        assert 0 < float(row["low_ms"]) <= float(row["ms"]) <= float(row["high_ms"])
    about = json.loads((tmp_path / "op.json").read_text())
    assert about["machine"]["threads"] == 1
    assert about["machine"]["versions"]["torch"] == torch.__version__.split("+")[0]
    assert about["settings"]["sizes"] == [16, 64]
    assert about["load"]["measured"] == len(rows)
    assert {at["candidate"] for at in about["crossovers"]} == names - {"sdpa"}
    assert (tmp_path / "op.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "op, train, bfloat16" in out
    assert "faster than sdpa from N" in out
    assert f"Saved {tmp_path / 'op'}.csv" in out


def test_the_table_shows_what_the_file_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "op", "--sizes", "16", *TINY, "--dtypes", "float32", "--modes", "forward", "--pooling"]
    assert main([*words, "--backends", "reference", "--output", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line for line in lines if line.startswith("op, forward, float32  1, 1, 16, 8, 4  ")]
    rows = read(tmp_path / "op.csv")
    assert [row["candidate"] for row in rows] == ["sdpa", "vca-reference", "vca-reference+pool"]
    for row, line in zip(rows, shown, strict=True):
        candidate, ms, quartiles, ratio, *_ = line.split()[8:]
        low, high = quartiles.lstrip("!").split("-")
        assert candidate == row["candidate"]
        for name, cell in {"ms": ms, "low_ms": low, "high_ms": high, "ratio": ratio}.items():
            assert float(cell) == pytest.approx(float(row[name]), abs=0.01)
    assert any(line.startswith("No figure: ") for line in lines)  # a single N
    assert not (tmp_path / "op.png").exists()


def test_the_table_marks_what_is_extrapolated_disturbed_or_not_run() -> None:
    measured = bench_row("sdpa", 1024, 100.0, low_ms=99.0, high_ms=125.0)
    far = bench_row("sdpa", 4096, 1600.0, "extrapolated")
    fast = bench_row("x", 4096, 16.0, low_ms=15.0, high_ms=20.0, ratio=100.0, ratio_status="extrapolated")
    out_of_time = bench_row("y", 4096, None, "not run: out of time")
    _, _, *lines, extrapolated, disturbed, busy = speed_table([measured, far, fast, out_of_time]).splitlines()
    assert [line.split()[8:] for line in lines] == [
        ["sdpa", "100.0", "!99.00-125.0", "-", "-"],
        ["sdpa", "~1600.0", "-", "-", "-"],
        ["x", "16.00", "!15.00-20.00", "~100.00", "-"],
        ["y", "-", "-", "-", "-", "not", "run:", "out", "of", "time"],
    ]
    assert extrapolated.startswith("~ ")
    assert disturbed.startswith("! in 2 of 2 rows")
    assert busy.startswith("The machine was busy")
    calm = [replace(row, high_ms=row.ms) for row in (measured, fast)]
    assert "busy" not in speed_table(calm)
    assert crossover_table([measured, fast]) == ""  # they share no N


def test_paper_measures_the_shapes_and_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "PAPER_SHAPES", (bench.Shape(2, 1, 16, 8, 4),))
    monkeypatch.setattr(candidates, "PAPER_SWEEP", (bench.Shape(1, 2, 4, 8, 4), bench.Shape(1, 2, 9, 8, 4)))
    words = ["bench", "op", "--paper", "--quick", "--backends", "portable", "--modes", "forward"]
    assert main([*words, "--dtypes", "float32", "--output", str(tmp_path)]) == 0
    shapes = [(row["B"], row["heads"], row["N"]) for row in read(tmp_path / "op.csv")[::2]]
    assert shapes == [("1", "2", "4"), ("1", "2", "9"), ("2", "1", "16")]


def test_layers_with_the_installed_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {peer.name: peer for peer in candidates.PEERS}
    missing = found["nystrom"]._replace(distribution="no-such-package")
    monkeypatch.setattr(candidates, "PEERS", (found["agent"], found["diff"], missing))
    words = ["bench", "layer", "--sizes", "16", *TINY, "--dtypes", "float32", "--modes", "forward"]
    assert main([*words, "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("Skipping peers that are not installed: no-such-package") == 1
    names = [row["candidate"] for row in read(tmp_path / "layer.csv")]
    assert [name for name in names if not name.startswith("vca-")] == ["sdpa", "agent", "diff"]
    assert main([*words, "--peers", "nystrom"]) == 2
    assert "no-such-package is not installed; run: " in capsys.readouterr().err


def test_models_and_generators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [
        "--rounds",
        "2",
        "--seconds",
        "0.001",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--output",
        str(tmp_path),
    ]
    names = ["vit_tiny_patch16_224", "vca_deit_tiny_patch16_224"]
    assert main(["bench", "model", *names, "--sizes", "112", "--batch-sizes", "1", "2", *short]) == 0
    out = capsys.readouterr().out
    assert all(f"model, forward, float32  {B}, 112, 1 " in out for B in (1, 2))
    rows = read(tmp_path / "model.csv")
    assert [(r["candidate"], r["B"], r["threads"]) for r in rows] == [
        (n, B, "1") for n in names for B in "12"
    ]
    assert json.loads((tmp_path / "model.json").read_text())["settings"]["names"] == names
    assert main(["bench", "generator", "sit_s_8", "--sizes", "16", "--modes", "train", *short]) == 0
    (row,) = read(tmp_path / "generator.csv")
    assert (row["level"], row["mode"], row["size"], row["N"]) == ("generator", "train", "16", "4")


def test_an_interruption_keeps_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> Iterator[list[Row]]:
        yield [bench_row("sdpa", 16, 2.5)]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="1 rows were measured and saved to .*op.csv"):
        record(interrupted(), output=tmp_path, name="op", settings={}, total=2)
    assert [row["ms"] for row in read(tmp_path / "op.csv")] == ["2.5"]
    assert json.loads((tmp_path / "op.json").read_text())["crossovers"] == []
    assert "sdpa       2.50" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["modle"], "did you mean model?"),
        (["op", "--backends", "portible"], "did you mean portable?"),
        (["layer", "--peers", "agnet"], "did you mean agent?"),
        (["op", "--peers", "agent"], "--peers"),
        (["op", "--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["op", "--device", "meta"], "device 'meta' computes nothing"),
        (["model", "--device", "meta"], "device 'meta' computes nothing"),
        (["model", "no_such_model"], "There is no model 'no_such_model'"),
        (["model", "vca_pvt_tiny", "--sizes", "33"], "does not take images of size 33"),
        (["generator", "sit_s_9"], "There is no DiT or SiT 'sit_s_9'"),
        (["generator", "sit_s_8", "--sizes", "4"], "does not take latents of size 4"),
        (["op", "--sizes"], "--sizes"),
        (["model", "--threads", "1", "0"], "--threads is 0"),
        (["op", "--threads", "1000000"], "--threads is 1000000"),
        (["model", "--rounds", "1"], "--rounds is 1; it must be at least 2"),
        *(
            ([command, "--seconds", value], f"--seconds is {float(value)}")
            for command, value in (("op", "0"), ("op", "-1"), ("model", "0"))
        ),
        *(
            ([command, "--seconds", value], f"--seconds {value}")
            for command in ("op", "model")
            for value in ("nan", "inf")
        ),
        *(
            (["layer", f"--{flag}", "0"], f"--{flag} is 0")
            for flag in ("sizes", "batch-size", "heads", "head-dim", "contrast-tokens", "threads", "rounds")
        ),
        *((["generator", f"--{flag}", "0"], f"--{flag} is 0") for flag in ("sizes", "batch-sizes", "rounds")),
        *((["op", "--contrast-tokens", value], value) for value in ("nan", "inf", str(2**62))),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
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
    backends = (*ops.list_backends(), ops.BackendInfo("unable", "fast", "needs a GPU of tomorrow"))
    monkeypatch.setattr(ops, "list_backends", lambda: backends)
    assert main(["bench", "--backends", "unable"]) == 2
    assert "needs a GPU of tomorrow" in capsys.readouterr().err
    assert "unable" not in candidates.choose_backends()


def test_help_lists_the_benchmarks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == [
        "op",
        "layer",
        "model",
        "generator",
    ]
