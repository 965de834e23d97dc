"""Query rows of a few heads with all their keys, kept so that S and L can be computed again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from certify.recording import KeptRows
from torch_clis.host import on_host
from torch_clis.record_ops import host_array

KEPT_ROWS = 64
"""Query rows kept of a head, evenly spaced over the sequence."""


@dataclass(frozen=True)
class Sample:
    """Which rows of which heads to keep: ``places`` are (batch element, query head) pairs."""

    places: tuple[tuple[int, int], ...]
    stride: int

    @classmethod
    def choose(cls, query: torch.Tensor, number: int) -> Sample:
        """``number`` heads spread over all heads, and over the batch, of ``[B, S_q, H, D]``."""
        batch, num_queries, heads, _ = query.shape
        number = min(number, heads)
        places = tuple((i % batch, (2 * i + 1) * heads // (2 * number)) for i in range(number))
        return cls(places, -(-num_queries // KEPT_ROWS))

    def size(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """Bytes that the sample takes."""
        rows = -(-query.shape[1] // self.stride) + key.shape[1]
        of_head = rows * query.shape[3] * query.element_size() + 4 * key.shape[1]
        return len(self.places) * of_head

    def take(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries ``[N, rows, D]``, keys ``[N, S_k, D]``, float32 max|v| ``[N, S_k]``."""
        shared = query.shape[2] // key.shape[2]
        queries = [query[batch, :: self.stride, head] for batch, head in self.places]
        keys = [key[batch, :, head // shared] for batch, head in self.places]
        values = [value[batch, :, head // shared] for batch, head in self.places]
        largest = [part.abs().amax(dim=-1).float() for part in values]
        return torch.stack(queries), torch.stack(keys), torch.stack(largest)


class KeptHeads:
    """A sample of a layer's first call.

    On a lazy device the graph of every call must be the same, or the second step would compile once
    more. So there the sample is a state that every call updates: with itself, but in the first
    call. A flag, which is data and not part of the graph, says which call it is.
    """

    def __init__(self, sample: Sample, pass_index: int) -> None:
        self._sample = sample
        self._pass_index = pass_index
        self._state: tuple[torch.Tensor, ...] = ()
        self._first: torch.Tensor | None = None

    def update(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take the sample if this is the first call."""
        if query.device.type != "xla":
            if not self._state:
                self._state = self._sample.take(query, key, value)
            return
        taken = self._sample.take(query, key, value)
        if self._first is None:
            # Zeros made on the device would be constants of the first step's graph.
            self._first = torch.ones(1, dtype=torch.bool, device="cpu").to(query.device)
            empty = (torch.zeros(part.shape, dtype=part.dtype, device="cpu") for part in taken)
            self._state = tuple(part.to(query.device) for part in empty)
        first = self._first
        pairs = zip(taken, self._state, strict=True)
        self._state = tuple(torch.where(first, new, old) for new, old in pairs)
        self._first = first & False

    def rows(self) -> tuple[KeptRows, ...]:
        """The sample, moved to the host; it also stays where it is."""
        queries, keys, largest = on_host(self._state)
        positions = np.arange(queries.shape[1], dtype=np.int64) * self._sample.stride
        return tuple(
            KeptRows(
                pass_index=self._pass_index,
                batch=batch,
                head=head,
                rows=positions,
                query=host_array(queries[index]),
                key=host_array(keys[index]),
                value_max=largest[index].numpy(),
            )
            for index, (batch, head) in enumerate(self._sample.places)
        )
