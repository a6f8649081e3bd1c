"""pytest plugin (-p lineardiff_only): timm's own tests/test_models.py on the models of this library only.

Loaded before collection, since that file calls list_models() in decorators. Where that file treats one of timm's
families in a way of its own, by the names of models or of modules, ours beside it are treated alike.
"""

import timm
import timm.models
from timm.models import _registry

import lineardiff  # registers the models

LIKE = {
    "deit*": ["vca_deit*", "pvt_v1_*", "vca_pvt_*"],  # features are tokens, not a map
    "deit": ["vca_deit"],
    "swin_transformer": ["vca_swin"],
    "pvt_v2": ["vca_pvt", "vca_cswin"],
}
_list_models = _registry.list_models


def _is_ours(name):
    architecture = name.split(".")[0]
    return timm.is_model(architecture) and timm.models.model_entrypoint(architecture).__module__.startswith(
        "lineardiff."
    )


def _with_ours(patterns):
    patterns = [patterns] if isinstance(patterns, str) else list(patterns or [])
    patterns = [p for p in patterns if p]
    return patterns + [ours for p in patterns for ours in LIKE.get(p, [])]


def list_models(
    filter="", module="", pretrained=False, exclude_filters="", name_matches_cfg=False, include_tags=None
):
    names = _list_models(
        _with_ours(filter),
        _with_ours(module),
        pretrained,
        _with_ours(exclude_filters),
        name_matches_cfg,
        include_tags,
    )
    return [name for name in names if _is_ours(name)]


def list_pretrained(filter="", exclude_filters=""):
    return list_models(filter, pretrained=True, exclude_filters=exclude_filters, include_tags=True)


for _module in (timm, timm.models, _registry):
    _module.list_models, _module.list_pretrained = list_models, list_pretrained


def pytest_collection_modifyitems(config, items):
    ours, others = [], []
    for item in items:
        name = str(getattr(getattr(item, "callspec", None), "params", {}).get("model_name", ""))
        (ours if _is_ours(name) else others).append(item)
    items[:] = ours
    config.hook.pytest_deselected(items=others)
    if not ours:
        raise RuntimeError(f"timm's suite collected no model of lineardiff {lineardiff.__version__}")
