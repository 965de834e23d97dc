"""What runs: Pallas TPU kernels of certified attention, and their JAX API."""

from jax_kernels.attention import attention, attention_backward, certificate_fields
from jax_kernels.config import BlockSizes, num_query_blocks
from jax_kernels.forward import CERTIFICATE_FIELDS
from jax_kernels.recording import record_bounds
from jax_kernels.reference import reference_attention

__all__ = [
    "CERTIFICATE_FIELDS",
    "BlockSizes",
    "attention",
    "attention_backward",
    "certificate_fields",
    "num_query_blocks",
    "record_bounds",
    "reference_attention",
]
