"""Saves its state when it ends, as an instance of a class of its own, and reads it back."""

import atexit
import json
import pickle
from dataclasses import dataclass


@dataclass
class State:
    step: int
    loss: float


state = State(0, 9.0)


def save() -> None:
    data = pickle.dumps(state)
    back = pickle.loads(data)
    print(
        "RESULT "
        + json.dumps(
            {
                "module": type(back).__module__,
                "same_class": type(back) is State,
                "equal": back == state,
                "step": back.step,
            }
        )
    )


atexit.register(save)
state = State(7, 0.5)
