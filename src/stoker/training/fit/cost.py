"""How long a micro-batch takes: arithmetic, and copies to host memory and back that it hides. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stoker.contract.frozen import frozen
from stoker.training.fit.cards import LINK_ELSE, NETWORK, Card
from stoker.training.model.config import ModelConfig, matmul_parameters

# Tokens of a micro-batch at which kernels reach half of their speed: 8B QLoRA at 2,048 and 8,192 tokens (an H200).
HALF_SPEED = 1024
# Of a card's peak that fused blocks reach at best (8B QLoRA, 8,192 tokens, an H200): the faster they are the less they hide.
FASTEST = 0.7
HOST_LINKS = 100e9  # bytes/s that a host's memory gives to all its cards
SHARE = 0.4  # of a card's peak that training reaches, where nothing was measured
ASSUMED = 100e12  # FLOP/s of a card that no table has, where ways to use it are compared


def flops_per_token(c: ModelConfig, context: int, passes: int, again: float = 0.0) -> float:
    """`passes`: products of each weight, 3 where it learns, 2 where it is frozen. `again`: share of the blocks that are
    recomputed."""
    products = 2 * matmul_parameters(c)
    attention = 4 * c.layers * c.heads * c.head_dim * context / 2  # causal: half of all pairs
    return (passes + again) * products + (3 + again) * attention


def mlp_share(c: ModelConfig, context: int) -> float:
    """Of a block's forward pass: the MLP's first product."""
    blocks = matmul_parameters(c) - c.dim * c.vocab_size + 2 * c.layers * c.heads * c.head_dim * context / 2
    return 2 * c.dim * c.ff * c.layers / blocks


def exchange_seconds(size: float, cards: Sequence[Card]) -> float:
    """Of gathering or reducing so many bytes over a ring of these cards, at the speed of its slowest link."""
    inside = min(card.peers for card in cards)
    link = min(inside, NETWORK) if len({card.host for card in cards}) > 1 else inside
    return size * (len(cards) - 1) / len(cards) / link


def host_seconds(size: float, cards: Sequence[Card]) -> float:
    """Of copying so many bytes to each card, or back, at the speed of the slowest."""
    beside = Counter(card.host for card in cards)
    return max(size / min(card.link or LINK_ELSE, HOST_LINKS / beside[card.host]) for card in cards)


@frozen
class Copies:
    """Of one micro-batch, beside its arithmetic."""

    bytes_each_way: int
    link: float  # bytes/s
    flops: float  # of forward and backward pass, nothing recomputed
    peak: float  # FLOP/s

    def time(self, forward: float, again: float) -> float:
        """Of both passes, where arithmetic without recomputing is 1: each takes as long as the slower of both. `forward`: the
        forward pass's part of that; `again`: share of the blocks that are recomputed."""
        copying = self.bytes_each_way / self.link / (self.flops / (self.peak * FASTEST))
        return max(forward, copying) + max(1 - forward + forward * again, copying)
