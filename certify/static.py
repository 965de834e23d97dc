"""Certificates from weights alone: what holds for every input, before the model has run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from certify import arithmetic, theorem
from certify.bounds import promised_bounds
from certify.checkpoint import open_checkpoints
from certify.files import parse_json
from certify.formats import Float32, printable
from certify.static_layers import find_layers, layer_bound

DEFAULT_NUM_KEYS = 2**17
"""More keys than any video or language model attends to at once today; fewer only help."""

SCHEMA = "certify.static"
SCHEMA_VERSION = 1

_WINDOW_STEPS = 40
"""Bisections of an interval of 127 exponents: 1e-10 bits."""


@dataclass(frozen=True, eq=False)
class StaticCertificate:
    """What the weights prove of the logits of one attention layer.

    The claim is about scale * query . key, soft cap included, as the kernel computes it from
    queries and keys in ``dtype``; keys that a mask hides do not matter, but an additive bias is not
    covered.

    Attributes:
        layer: name of the attention module in its checkpoint.
        logit_bound: float32 [H], bits: |logit| <= logit_bound for every input; inf: no claim.
        reason: what the claim rests on, or why there is none.
        dtype: of the activations: bfloat16, float16 or float32.
        fewest_keys: 1 where the layer's own mask (causal) leaves some row a single key; None where
            every row sees every key.

    Raises:
        ValueError: where ``logit_bound`` is not float32 [H] of numbers >= 0.
    """

    layer: str
    logit_bound: Float32
    reason: str
    dtype: str = "bfloat16"
    fewest_keys: int | None = None

    def __post_init__(self) -> None:
        arithmetic.arithmetic_for(self.dtype)
        bound = self.logit_bound
        if bound.dtype != np.float32 or bound.ndim != 1 or not bound.size:
            given = f"{bound.dtype} of shape {bound.shape}"
            raise ValueError(f"logit_bound: got {given}; expected float32 of shape [H].")
        if not np.all(bound >= 0):
            raise ValueError(f"logit_bound: got {bound.tolist()}; bounds are 0 or more bits.")

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return int(self.logit_bound.size)

    def gap(self, num_keys: int = DEFAULT_NUM_KEYS) -> Float32:
        """float32 [H], bits: S - L of the worst row, as the kernel takes them from a promise.

        S speaks of all n keys; where a row may see fewer, L speaks of the fewest, and log2 of
        their ratio comes on top.
        """
        rows = promised_bounds(self.logit_bound, num_keys=num_keys, xp=np)
        unseen = 0.0 if self.fewest_keys is None else math.log2(num_keys / self.fewest_keys)
        return np.asarray(rows.upper - rows.lower + max(unseen, 0.0), np.float32)

    def budget(
        self,
        num_keys: int = DEFAULT_NUM_KEYS,
        tolerance: float = arithmetic.DEFAULT_TOLERANCE,
        value_low: npt.ArrayLike = 1.0,
        value_high: npt.ArrayLike = 1.0,
    ) -> npt.NDArray[np.float64]:
        """Bits that the theorem allows for rows whose max|v| lies between the two values."""
        arithmetic.validate_tolerance(tolerance)
        low, high = (np.asarray(part, np.float64) for part in (value_low, value_high))
        with np.errstate(invalid="ignore"):
            head = theorem.limits(
                high,
                num_keys=num_keys,
                tolerance=tolerance,
                kernel=arithmetic.arithmetic_for(self.dtype),
                xp=np,
                value_low=low,
            )
        return np.asarray(head.budget, np.float64)

    def certified(
        self,
        num_keys: int = DEFAULT_NUM_KEYS,
        tolerance: float = arithmetic.DEFAULT_TOLERANCE,
        value_low: npt.ArrayLike = 1.0,
        value_high: npt.ArrayLike = 1.0,
    ) -> npt.NDArray[np.bool_]:
        """bool [H]: every input is certified, given values between the two.

        Args:
            num_keys: keys that are summed.
            tolerance: as in ``certify.certify``.
            value_low: max|v| over the keys that a row sees is at least this ([H] or a number).
            value_high: max|v| over all keys is at most this.

        Raises:
            ValueError: for a tolerance that cannot be proved.
        """
        return np.asarray(
            self.gap(num_keys) <= self.budget(num_keys, tolerance, value_low, value_high)
        )

    def value_window(
        self,
        num_keys: int = DEFAULT_NUM_KEYS,
        tolerance: float = arithmetic.DEFAULT_TOLERANCE,
    ) -> tuple[Float32, Float32]:
        """(V_lo, V_hi), float32 [H] each: certified for every max|v| from V_lo to V_hi.

        max|v| is one number of a head whose keys every row sees. A head that is not certified for
        any has the empty window (inf, 0). Values that are all 0 are certified as well.
        """
        gap = self.gap(num_keys).astype(np.float64)

        def allowed(exponent: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
            value = np.exp2(exponent)
            return np.asarray(gap <= self.budget(num_keys, tolerance, value, value))

        # The budget falls on either side of max|v| = 1: see theorem.limits.
        some = allowed(np.zeros_like(gap))
        edges = []
        for extreme in (-126.0, 127.0):
            inside, outside = np.zeros_like(gap), np.full_like(gap, extreme)
            whole = allowed(outside)
            for _ in range(_WINDOW_STEPS):
                middle = 0.5 * (inside + outside)
                good = allowed(middle)
                inside = np.where(good, middle, inside)
                outside = np.where(good, outside, middle)
            edges.append(np.where(whole, extreme, inside))
        low = np.exp2(np.where(some, edges[0], np.inf)).astype(np.float32)
        high = np.exp2(np.where(some, edges[1], -np.inf)).astype(np.float32)
        return np.nextafter(low, np.float32(np.inf)), np.nextafter(high, np.float32(0.0))

    def to_json(self) -> str:
        """One JSON object; null stands for inf."""
        return json.dumps(
            {
                "schema": SCHEMA,
                "version": SCHEMA_VERSION,
                "layer": self.layer,
                "dtype": self.dtype,
                "fewest_keys": self.fewest_keys,
                "reason": self.reason,
                "logit_bound": [
                    float(bits) if np.isfinite(bits) else None for bits in self.logit_bound
                ],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> StaticCertificate:
        """The certificate that ``to_json`` wrote.

        Raises:
            ValueError: when the text is not one, or of another version of the schema.
        """
        try:
            document: dict[str, Any] = parse_json(text)
            schema, version = document["schema"], document["version"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"text: not the JSON of a static certificate ({error!r}).") from error
        if schema != SCHEMA or version != SCHEMA_VERSION:
            raise ValueError(
                f"text: got schema {schema!r} version {version!r}; this release reads {SCHEMA!r} "
                f"version {SCHEMA_VERSION}."
            )
        try:
            bits = [np.inf if bound is None else float(bound) for bound in document["logit_bound"]]
            fewest = document["fewest_keys"]
            return cls(
                layer=str(document["layer"]),
                logit_bound=np.array(bits, np.float32),
                reason=str(document["reason"]),
                dtype=str(document["dtype"]),
                fewest_keys=None if fewest is None else int(fewest),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"text: a part of the certificate is wrong ({error!r}).") from error


def static_certificates(
    path: str | Path,
    *,
    dtype: str = "bfloat16",
    progress: Callable[[int, int], None] | None = None,
) -> list[StaticCertificate]:
    """What the weights of a checkpoint prove of each of its attention layers.

    Only config files and the small norm tensors are read.

    Args:
        path: a directory as diffusers or transformers saves it: config.json beside .safetensors
            files (sharded or not), or a pipeline with model_index.json.
        dtype: that the model will run in: bfloat16, float16 or float32.
        progress: called with the number of layers done and their total.

    Raises:
        ValueError: where there is no such checkpoint, a file is missing, truncated or of another
            format, or a tensor does not have the shape that the config says. One line each.
    """
    arithmetic.arithmetic_for(dtype)
    pairs = [
        (checkpoint, layer)
        for checkpoint in open_checkpoints(Path(path))
        for layer in find_layers(checkpoint)
    ]
    certificates = []
    for index, (checkpoint, layer) in enumerate(pairs):
        bound, reason = layer_bound(checkpoint, layer, dtype=dtype)
        certificates.append(
            StaticCertificate(
                layer=printable(f"{checkpoint.prefix}{layer.name}"),
                logit_bound=bound,
                reason=printable(reason),
                dtype=dtype,
                fewest_keys=1 if layer.causal else None,
            )
        )
        if progress is not None:
            progress(index + 1, len(pairs))
    return certificates
