"""Attention processors for diffusers' transformers."""

from torch_clis.diffusers.processor import CLiSProcessor
from torch_clis.diffusers.totals import AttentionSummary, HeadTotals

__all__ = ["AttentionSummary", "CLiSProcessor", "HeadTotals"]
