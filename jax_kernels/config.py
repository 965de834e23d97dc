"""Frozen, validated settings of the attention kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from certify.arithmetic import KernelArithmetic, arithmetic_for

LANES = 128
"""Width of a vector register and of a column block in HBM."""

CHUNK_KEYS = 512
"""Keys per matrix product inside a KV block: straight-line bodies of this length schedule well."""

LARGEST_BLOCK_Q = 2048
LARGEST_BLOCK_KV = 2048
"""For head_dim up to 128; larger heads take proportionally smaller blocks, to fit on chip."""

SINGLE_BLOCK_KEYS = 1024
"""Keys up to this number are one block: the true row maximum is known before anything is added."""

LARGEST_HEAD_DIM = 512

PATHS = ("auto", "clis", "online")


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``number``."""
    return -(-number // multiple) * multiple


def div(number: Any, by: int) -> Any:
    """Quotient of a non-negative int32, without the sign handling of floor division."""
    return jax.lax.div(number, jnp.int32(by))


def rem(number: Any, by: int) -> Any:
    """Remainder of a non-negative int32."""
    return jax.lax.rem(number, jnp.int32(by))


@dataclass(frozen=True)
class BlockSizes:
    """Tile of the attention kernels: queries and keys per grid step.

    Raises:
        ValueError: where a size is not a positive multiple of 128.
    """

    block_q: int
    block_kv: int

    def __post_init__(self) -> None:
        for name in ("block_q", "block_kv"):
            size = getattr(self, name)
            if not isinstance(size, int) or size <= 0 or size % LANES:
                raise ValueError(
                    f"block_sizes: {name} is {size!r}; give a positive multiple of {LANES}."
                )

    @property
    def chunk_kv(self) -> int:
        """Keys per matrix product: the largest divisor of block_kv up to ``CHUNK_KEYS``."""
        return next(
            c for c in range(min(CHUNK_KEYS, self.block_kv), 0, -LANES) if not self.block_kv % c
        )


def _balanced(length: int, largest: int, multiple: int) -> int:
    """A block size for which the last block of ``length`` is nearly full."""
    blocks = -(-length // largest)
    return round_up(-(-length // blocks), multiple)


def choose_block_sizes(query_length: int, key_length: int, head_dim: int) -> BlockSizes:
    """The rule for block sizes: as few and as even blocks as the largest tile allows."""
    shrink = round_up(head_dim, LANES) // LANES
    block_q = _balanced(max(query_length, 1), LARGEST_BLOCK_Q // shrink // LANES * LANES, LANES)
    single = SINGLE_BLOCK_KEYS if shrink == 1 else CHUNK_KEYS
    if key_length <= single:
        return BlockSizes(block_q, round_up(max(key_length, 1), LANES))
    largest = max(LARGEST_BLOCK_KV // shrink // CHUNK_KEYS, 1) * CHUNK_KEYS
    largest = single if key_length <= largest else largest
    return BlockSizes(block_q, _balanced(key_length, largest, CHUNK_KEYS))


def num_query_blocks(
    query_shape: tuple[int, ...],
    key_shape: tuple[int, ...],
    block_sizes: BlockSizes | None = None,
) -> int:
    """Number of query blocks that a certificate has, for [B, S, H, D] shapes."""
    sizes = block_sizes or choose_block_sizes(query_shape[1], key_shape[1], query_shape[3])
    return -(-query_shape[1] // sizes.block_q)


def computed_in(dtype: Any) -> Any:
    """float16 is computed in float32: its probabilities would vanish below 2^-24."""
    return jnp.float32 if dtype == jnp.float16 else dtype


@dataclass(frozen=True)
class Problem:
    """One unmasked attention call as the kernels see it: static shapes and settings.

    ``head_dim`` counts the channels in HBM, a multiple of 64 after any padding. Heads of 64
    channels are taken two at a time, so that a column block has 128 lanes.
    """

    batch: int
    query_length: int
    key_length: int
    query_heads: int
    key_heads: int
    head_dim: int
    dtype: Any
    scale: float
    tolerance: float
    blocks: BlockSizes
    interpret: bool

    @property
    def kernel(self) -> KernelArithmetic:
        return arithmetic_for(jnp.dtype(self.dtype).name)

    @property
    def query_in_halves(self) -> bool:
        """Whether a scaled query is held as a high and a low half, as bfloat16 asks for."""
        return bool(jnp.dtype(self.dtype) == jnp.bfloat16)

    @property
    def heads_per_group(self) -> int:
        return 2 if self.head_dim * 2 == LANES else 1

    @property
    def group_width(self) -> int:
        return self.heads_per_group * self.head_dim

    @property
    def query_groups(self) -> int:
        """Column blocks of Q in one batch element."""
        return -(-self.query_heads // self.heads_per_group)

    @property
    def key_groups(self) -> int:
        return -(-self.key_heads // self.heads_per_group)

    @property
    def num_q_blocks(self) -> int:
        return -(-self.query_length // self.blocks.block_q)

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.key_length // self.blocks.block_kv)

    @property
    def num_blocks(self) -> int:
        """(batch, head group, query block) triples, the units of work of a kernel."""
        return self.batch * self.query_groups * self.num_q_blocks
