"""The tokens of a micro-batch whose documents share what they begin with, each computed once.

The keys of a document are copies of those that it shares, and its own, so that attention stays one
causal call. All else of a layer sees each token by itself. The backward pass adds up what reaches a
token from all documents that have it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pgtoolkit.batch import MicroBatch, without_waiting
from pgtoolkit.model.attention import Documents


@dataclass(frozen=True)
class SharedAxis:
    """Axes: T positions of the micro-batch, S of them that are computed.

    computed: (S,) int64, the positions that are computed, among T. The others have the state of one
        of these.
    states: (T,) int64, where each position finds its state among S.
    documents: what attention is confined to.
    """

    computed: Tensor
    states: Tensor
    documents: Documents

    @staticmethod
    def of(micro_batch: MicroBatch) -> SharedAxis:
        device = micro_batch.tokens.device
        computed = []
        states = []
        sources = []
        queries = []
        position = 0
        num_computed = 0
        # Where each token of the document before is found among those that are computed.
        places = torch.empty(0, dtype=torch.int64)
        for length, shared in zip(micro_batch.document_lengths, micro_batch.shared, strict=True):
            alone = length - shared
            places = torch.cat([places[:shared], torch.arange(num_computed, num_computed + alone)])
            states.append(places[max(0, shared - 1) :])
            end = position + len(states[-1])
            computed.append(torch.arange(end - alone, end))
            sources.append(places)
            queries.append(alone)
            position = end
            num_computed += alone
        indices = (torch.cat(each) for each in (computed, states, sources))
        computed, states, sources = (without_waiting(index, device) for index in indices)
        documents = Documents(queries, micro_batch.document_lengths, device, sources=sources)
        return SharedAxis(computed, states, documents)
