"""The public surface: every name resolves, and importing the package stays light."""

import subprocess
import sys

import pytest

import lineardiff

HEAVY = ("accelerate", "datasets", "diffusers", "jinja2", "matplotlib", "tensorboard", "torchdiffeq", "tyro")


@pytest.mark.parametrize("name", lineardiff.__all__)
def test_every_public_name_resolves(name):
    assert getattr(lineardiff, name) is not None
    assert name in dir(lineardiff)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'VisualContrast'"):
        lineardiff.VisualContrast  # noqa: B018


def test_importing_the_package_registers_the_models_and_nothing_heavy():
    """Modules are compared with those of timm, so that a timm which imports one of them changes nothing."""
    code = f"""
import sys, timm
before = set(sys.modules)
import lineardiff
added = {{name.split(".")[0] for name in set(sys.modules) - before}}
assert not added & set({HEAVY!r}), added
assert timm.is_model("vca_deit_tiny_patch16_224") and timm.is_model("pvt_v1_tiny")
from lineardiff import DiT
assert DiT.__module__ == "lineardiff.models.dit" and "diffusers" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
