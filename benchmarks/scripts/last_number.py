"""A reward for serve_overlap.py: 1 where what follows the last semicolon is the answer."""


def score(completion: str, answer: str) -> float:
    return float(completion.rpartition(";")[2].strip() == answer)
