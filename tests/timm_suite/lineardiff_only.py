"""pytest plugin (-p lineardiff_only): timm's own tests/test_models.py on the models of this library only.

Loaded before collection, since that file calls list_models() in decorators. A model `vca_deit_tiny_...` in
the module `vca_deit` is treated as timm treats its `deit_tiny_...` in `deit`: every name filter and module
filter is mirrored with the prefix.
"""

import timm
import timm.models
from timm.models import _registry

import lineardiff  # registers the models

PREFIX = "vca_"
_list_models = _registry.list_models


def _mirror(patterns):
    patterns = [patterns] if isinstance(patterns, str) else list(patterns or [])
    patterns = [p for p in patterns if p]
    return patterns + [PREFIX + p for p in patterns]


def list_models(
    filter="", module="", pretrained=False, exclude_filters="", name_matches_cfg=False, include_tags=None
):
    names = _list_models(
        _mirror(filter), _mirror(module), pretrained, _mirror(exclude_filters), name_matches_cfg, include_tags
    )
    return [name for name in names if name.startswith(PREFIX)]


def list_pretrained(filter="", exclude_filters=""):
    return list_models(filter, pretrained=True, exclude_filters=exclude_filters, include_tags=True)


for _module in (timm, timm.models, _registry):
    _module.list_models, _module.list_pretrained = list_models, list_pretrained


def pytest_collection_modifyitems(config, items):
    ours, others = [], []
    for item in items:
        name = str(getattr(getattr(item, "callspec", None), "params", {}).get("model_name", ""))
        (ours if name.startswith(PREFIX) else others).append(item)
    items[:] = ours
    config.hook.pytest_deselected(items=others)
    if not ours:
        raise RuntimeError(f"timm's suite collected no model of lineardiff {lineardiff.__version__}")
