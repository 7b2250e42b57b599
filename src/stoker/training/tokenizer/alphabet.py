"""The byte-level alphabet of GPT-2's tokenizer.json: each byte is written as one printable character."""

from __future__ import annotations


def _characters() -> tuple[str, ...]:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return tuple(chr(byte) if byte in printable else chr(next(spare)) for byte in range(256))


CHARACTERS = _characters()  # byte -> character
_BYTES = {character: byte for byte, character in enumerate(CHARACTERS)}


def written(data: bytes) -> str:
    return "".join(CHARACTERS[byte] for byte in data)


def read(token: str) -> bytes | None:
    """The bytes a token of the vocabulary stands for; None where it is not written in this alphabet."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return None
