"""Bounds from weights against diffusers' and transformers' own modules: never exceeded, reached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from certify.static import StaticCertificate, static_certificates
from certify.static_families import FAMILIES
from tests.certify.static_models import HEAD_DIM, MODELS, Watch, make, save, watching


def claims(path: Path, dtype: str) -> dict[str, StaticCertificate]:
    """Certificates of the layers of which something is proved."""
    found = static_certificates(path, dtype=dtype)
    return {item.layer: item for item in found if np.isfinite(item.logit_bound).all()}


def run(built: torch.nn.Module, name: str, dtype: str, layers: list[str]) -> Watch:
    """Drive one channel after the other; the largest logit of each layer and head."""
    tensor_dtype = getattr(torch, dtype)
    with watching(built, layers) as watch:
        for watch.hot in range(0, HEAD_DIM, 1 if dtype == "float32" else 2):
            built(**MODELS[name].inputs(tensor_dtype))
    return watch


@pytest.mark.parametrize("name", MODELS)
def test_real_modules_stay_within_the_bound_and_reach_it(name: str, tmp_path: Path) -> None:
    """Catches a family whose norm, pairs of channels, order, scale, streams or heads are wrong."""
    built = make(MODELS[name])
    save(built, tmp_path)
    largest_share = 0.0
    for dtype in ("float32", "bfloat16"):
        certificates = claims(tmp_path, dtype)
        assert certificates
        built = built.to(getattr(torch, dtype))
        watch = run(built, name, dtype, list(certificates))
        assert watch.largest.keys() == certificates.keys()
        for layer, largest in watch.largest.items():
            bound = certificates[layer].logit_bound
            assert largest.shape == bound.shape
            assert (largest.numpy() <= bound).all(), (layer, largest, bound)
            largest_share = max(largest_share, float(np.max(largest.numpy() / bound)))
    assert largest_share >= MODELS[name].reach


def test_every_listed_family_is_driven() -> None:
    """Catches a class added to the table without a test against the class itself."""
    built: list[Any] = [model.build() for model in MODELS.values()]
    tested = {getattr(each.config, "model_type", type(each).__name__) for each in built}
    # These have no norm; their soft cap is tested in test_static.
    assert tested | {"gemma2", "vaultgemma"} == set(FAMILIES)
