"""Mutants of what a bound saves where few keys lie at the edge."""

from __future__ import annotations

from certify import bounds, keys, summary
from tests.certify.mutants import Mutant

SAVING_MUTANTS = [
    Mutant(
        "saved in full at every reach",
        bounds.saving,
        "xp.minimum(reach * (1.0 / SAVING_BITS), 1.0) * saved",
        "saved + 0.0 * reach",
        "saved_bits",
    ),
    Mutant(
        "saved without end",
        bounds.saving,
        "xp.minimum(reach * (1.0 / SAVING_BITS), 1.0)",
        "reach * (1.0 / SAVING_BITS)",
        "saved_bits",
    ),
    Mutant(
        "nothing is saved",
        bounds.saving,
        "1.0) * saved",
        "0.0) * saved",
        "saving_is_had",
    ),
    Mutant(
        "a group counts as one key",
        summary.bits_saved,
        "xp.sum(count * xp.exp2(bits), axis=-1)",
        "xp.sum((count > 0) * xp.exp2(bits), axis=-1)",
        "saved_bits",
    ),
    Mutant(
        "empty groups are the farthest",
        summary.bits_saved,
        "xp.max(xp.where(present, distance, 0.0), axis=-1, keepdims=True)",
        "xp.max(distance + 1.0, axis=-1, keepdims=True)",
        "saved_bits",
    ),
    Mutant(
        "blocks lie at the ball's center",
        summary.summarize_keys,
        "(offset[..., None] + inward)",
        "(0.0 * offset[..., None] + distances)",
        "saved_bits",
    ),
    Mutant(
        "the others of a class are forgotten",
        keys.key_groups,
        "xp.sum(part.astype(xp.float32), axis=1) for part in groups",
        "xp.sum(part.astype(xp.float32), axis=1) for part in (groups[0], groups[0] & ~farthest)",
        "saved_bits",
    ),
    Mutant(
        "the farthest of a class is forgotten",
        keys.key_groups,
        "others & farthest, others & ~farthest",
        "others & ~farthest, others & ~farthest",
        "groups",
    ),
    Mutant(
        "groups of sentinels",
        keys.key_groups,
        "squared=largest(squared, groups)",
        "squared=0.5 * largest(squared, groups)",
        "groups",
    ),
    Mutant(
        "saved by rows that see a part",
        bounds.masked_exponents,
        "xp.where(seen.whole, reach.saving, 0.0)",
        "reach.saving",
        "saving_of_whole_blocks",
    ),
    Mutant(
        "saved under a cap",
        bounds.masked_exponents,
        "high = soft_capped(high, soft_cap, xp=xp) + slack",
        "high = soft_capped(high, soft_cap, xp=xp) + slack - reach.saving",
        "saving_under_a_cap",
    ),
    Mutant(
        "the scaled reach saves by its slack",
        bounds.scaled_reach,
        "saving(measured, scaled_saved, xp=xp)",
        "2.0 * saving(measured, scaled_saved, xp=xp)",
        "saved_bits",
    ),
]
