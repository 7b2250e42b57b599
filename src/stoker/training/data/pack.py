"""Best-fit-decreasing: whole conversations into rows, the longest first, each into the fullest row that still has room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.contract.shape import shape


@shape
class Packing:
    rows: int
    row: NDArray[np.int64]  # of each conversation
    start: NDArray[np.int64]  # where it begins in its row
    fill: float  # share of the rows that is not padding


def best_fit(lengths: NDArray[np.int64], capacity: int) -> Packing:
    """A Python integer is the set of free sizes that some row has: finding the best fit is one shift. A million take
    two seconds.
    """
    assert len(lengths) > 0 and int(lengths.min()) > 0 and int(lengths.max()) <= capacity
    row = np.empty(len(lengths), dtype=np.int64)
    start = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(capacity + 1)]  # free size -> rows
    free = 0
    rows = 0
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        fitting = free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            mine = open_rows[room].pop()
            if not open_rows[room]:
                free &= ~(1 << room)
        else:
            room, mine, rows = capacity, rows, rows + 1
        row[place], start[place] = mine, capacity - room
        left = room - length
        if left:
            open_rows[left].append(mine)
            free |= 1 << left
    return Packing(rows, row, start, float(lengths.sum()) / (rows * capacity))
