"""Never steps: tokenises with processes of its own and says little."""

import multiprocessing
import time

from training import RANK, arguments


def tokenise(seconds: float) -> int:
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        count += len({word: len(word) for word in ("some", "words", "of", "a", "long", "text")})
    return count


def main() -> None:
    told = arguments(seconds=3.0, shards=6, processes=1)
    with multiprocessing.get_context("fork").Pool(told.processes) as pool:
        for shard, tokens in enumerate(pool.imap(tokenise, [told.seconds] * told.shards)):
            if RANK == 0:
                print(f"shard {shard}: {tokens} tokens")


if __name__ == "__main__":
    main()
