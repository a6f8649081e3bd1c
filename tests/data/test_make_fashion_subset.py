import hashlib
import importlib.util
import re
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "make_fashion_subset.py"
FASHION = files("lineardiff.data") / "fashion"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_fashion_subset", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawing_again_gives_the_embedded_arrays(script):
    if not script.DEBIAN.is_dir():
        pytest.skip(f"{script.DEBIAN} does not exist: apt install dataset-fashion-mnist")
    drawn = script.draw_subset(script.DEBIAN)
    with np.load(FASHION / "fashion.npz", allow_pickle=False) as embedded:
        assert sorted(embedded) == sorted(drawn)
        for name in embedded:
            np.testing.assert_array_equal(embedded[name], drawn[name])


def test_readme_holds_the_checksum_of_the_file():
    stated = re.search(r"`([0-9a-f]{64})`", (FASHION / "README.md").read_text()).group(1)
    assert hashlib.sha256((FASHION / "fashion.npz").read_bytes()).hexdigest() == stated


def test_licence_names_the_copyright_holder():
    licence = (FASHION / "LICENSE").read_text()
    assert "Copyright © 2017 Zalando SE" in licence
    assert "Permission is hereby granted, free of charge" in licence


def test_a_file_that_is_not_idx_is_refused(script, tmp_path):
    import gzip

    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(b"not idx"))
    with pytest.raises(ValueError, match=r"train-images.*not an IDX file"):
        script.read_idx(path)
