"""GPUs a plan is for: those that are here, or those that are written down (4x24GB, H100). Pure."""

from __future__ import annotations

import re

from stoker.contract.errors import EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.units import parse_bytes

GIB = 1 << 30
# Dense bf16 (fp16 before Ampere) with fp32 accumulation, TFLOP/s, as the vendor's sheets have it; GiB on the card; compute
# capability.
CARDS: dict[str, tuple[float, int, int]] = {
    "B200": (2250.0, 180, 10), "GB200": (2500.0, 186, 10), "B300": (2250.0, 270, 10), "H200": (989.0, 140, 9), "GH200": (989.0, 96, 9),
    "H100 PCIe": (756.0, 80, 9), "H100 NVL": (835.0, 94, 9), "H100": (989.0, 80, 9), "H800": (989.0, 80, 9), "H20": (148.0, 96, 9),
    "A100": (312.0, 40, 8), "A800": (312.0, 80, 8), "A30": (165.0, 24, 8), "A40": (149.7, 48, 8), "A10G": (70.0, 24, 8), "A10": (125.0, 24, 8),
    "L40S": (362.0, 48, 8), "L40": (181.0, 48, 8), "L4": (121.0, 24, 8), "RTX 6000 Ada": (364.2, 48, 8), "RTX A6000": (154.8, 48, 8),
    "RTX A5000": (111.1, 24, 8), "RTX 5090": (209.5, 32, 12), "RTX 5080": (112.6, 16, 12), "RTX 4090": (165.2, 24, 8), "RTX 4080": (97.5, 16, 8),
    "RTX 3090": (71.0, 24, 8), "RTX 3080": (59.5, 10, 8),
    "T4": (65.0, 15, 7), "V100": (125.0, 16, 7), "RTX 2080": (42.4, 8, 7),
}  # fmt: skip
_BEFORE_AMPERE = {"t4", "v100", "1650", "1660", "2060", "2070", "2080"}  # words of their names
# Beside a known name these make another card, or a part of one.
_OTHER_CARD = {"laptop", "max", "mig", "ti", "super", "d"}
# A card shows a little less than its name says: 24,564 MiB of 24 GB, 81,559 of 80.
SHOWN = 0.995
# A CUDA context with kernels loaded took 0.47 to 0.92 GiB, NCCL 0.3 to 1.4 besides, on the machines that were measured; on an
# H200, with the kernels of a training step, 0.72 to 0.81.
CONTEXT, NCCL = 576 << 20, 512 << 20
CONTEXTS = {9: 784 << 20, 10: 784 << 20}  # by compute capability: a card with more multiprocessors takes more
BF16_SINCE = 8  # compute capability: Ampere
# Bytes/s of copies between a card and pinned host memory, one way, by compute capability: servers with Hopper or Blackwell have
# PCIe 5 x16 (50 GB/s and more). Elsewhere it may be any slot: PCIe 4 x16 gives 25 GB/s.
LINKS = {9: 40e9, 10: 40e9}
LINK_ELSE = 20e9
# Bytes/s that a ring of collectives reaches between the cards of a host: NVLink of servers' cards, else PCIe (GeForce cards go
# through host memory); and between hosts where nobody says: 10 Gbit/s.
PEERS = {
    "B200": 500e9, "GB200": 500e9, "B300": 500e9, "H200": 300e9, "GH200": 300e9, "H100": 300e9, "H800": 150e9, "H20": 300e9,
    "A100": 200e9, "A800": 150e9, "V100": 100e9,
}  # fmt: skip
PEERS_ELSE, NETWORK = 10e9, 1.1e9


@frozen
class Card:
    name: str
    total: int  # bytes
    free: int  # now; of a card that is only written down, all of it
    label: str = "GPU 0"
    host: str = ""
    held: tuple[str, ...] = ()  # who holds the rest
    held_bytes: int = 0
    context: int = 0  # bytes that a process takes besides its tensors, where that was measured
    host_free: int | None = None  # bytes of its host's memory that are available; None: nobody knows

    @property
    def peak(self) -> float | None:
        """FLOP/s; None: a card that nobody knows."""
        return peak_of(self.name)

    @property
    def capability(self) -> int:
        known = _known(self.name)
        if known is None and _BEFORE_AMPERE & set(_words(self.name)):  # a 2080 Ti, say
            return 7
        return CARDS[known][2] if known else 8

    @property
    def takes(self) -> int:
        """Bytes of a process besides its tensors."""
        return self.context or CONTEXTS.get(self.capability, CONTEXT)

    @property
    def link(self) -> float | None:
        """Bytes/s to host memory; None: nobody knows its slot."""
        return LINKS.get(self.capability)

    @property
    def peers(self) -> float:
        """Bytes/s to the other cards of its host, about."""
        return PEERS.get(_known(self.name) or "", PEERS_ELSE)

    @property
    def dtype(self) -> str:
        """What compute.dtype auto is on it."""
        return "bf16" if self.capability >= BF16_SINCE else "fp16"

    def room(self, ranks: int) -> int:
        """For tensors."""
        return self.free - self.takes - (NCCL if ranks > 1 else 0)


def _known(name: str) -> str | None:
    """The longest known name whose words are in it."""
    words = _words(name)
    if _OTHER_CARD & set(words):
        return None
    fits = [known for known in CARDS if f" {' '.join(_words(known))} " in f" {' '.join(words)} "]
    return max(fits, key=len) if fits else None


def peak_of(name: str) -> float | None:
    """FLOP/s of the card of this name."""
    known = _known(name)
    return CARDS[known][0] * 1e12 if known else None


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def written(text: str) -> list[Card] | None:
    """Cards of `4x24GB`, `12GB,8GB,8GB`, `2xH100`, `8xA100 80GB`. None: these are numbers of GPUs that are here."""
    parts = [part.strip() for part in text.split(",")]
    if all(re.fullmatch(r"\d+(\.\d+)?", part) for part in parts):
        return None
    cards: list[Card] = []
    for part in parts:
        match = re.fullmatch(r"(?:(\d{1,4})\s*[x×*]\s*)?(.*?)\s*(\d+(?:\.\d+)?\s*Gi?B?)?", part, re.IGNORECASE)
        count, name, memory = match.groups() if match else (None, "", None)
        known = _known(name) if name else None
        if not match or (name and known is None) or not (name or memory) or count in ("0", "00"):
            raise Refusal(
                f"--gpus {text[:80]}: {part[:40]!r} is not a known GPU; write memory (4x24GB), one of"
                f" {', '.join(list(CARDS)[:6])} …, or the numbers of GPUs here (0,1)",
                EX_USAGE,
            )
        total = int((_gib(memory) if memory else CARDS[known or ""][1]) * SHOWN * GIB)
        if total < GIB:
            raise Refusal(f"--gpus {text[:80]}: a card of {memory} is too small to train on", EX_USAGE)
        for _ in range(int(count or 1)):
            cards.append(Card(known or f"{memory} card", total, total, f"GPU {len(cards)}"))
    return cards


def _gib(text: str) -> float:
    """Sellers call a GiB of a card a GB."""
    return parse_bytes(re.sub(r"\s*Gi?B?$", "", text, flags=re.IGNORECASE) + "GB") / 1e9
