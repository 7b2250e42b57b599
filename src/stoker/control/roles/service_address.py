"""How much a server has done: requests and tokens, by the page of metrics that it serves (Prometheus' text format). Pure."""

from __future__ import annotations

import math
import re

from stoker.contract.frozen import frozen

# Counters of requests answered and tokens written, by who counts them. vLLM, SGLang, TGI; and a server of one's own.
_COUNTERS = {
    "requests": (
        "vllm:request_success_total", "sglang:num_requests_total", "tgi_request_success", "requests_total",
        "stoker_serve_answers_total",
    ),
    "tokens": (
        "vllm:generation_tokens_total", "sglang:generation_tokens_total", "tgi_request_generated_tokens_sum",
        "generated_tokens_total", "stoker_serve_tokens_total",
    ),
}  # fmt: skip
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]{0,199})(?:\{[^\n]*\})?[ \t]+(\S{1,40})(?:[ \t]+-?\d{1,20})?[ \t\r]*", re.ASCII)


@frozen
class Served:
    requests: int = 0
    tokens: int = 0


def parse(text: str) -> Served | None:
    """All samples of a counter together: one has a label for each model, or each reason of an end. None: it counts neither."""
    found: dict[str, float] = {}
    for line in text.split("\n"):
        if line.startswith("#") or not (sample := _SAMPLE.fullmatch(line)):
            continue
        name, told = sample.groups()
        kind = next((kind for kind, names in _COUNTERS.items() if name in names), "")
        try:
            value = float(told) if kind else 0.0
        except ValueError:
            continue
        if kind and math.isfinite(value) and 0 <= value < 1e18:
            found[kind] = found.get(kind, 0.0) + value
    return Served(**{kind: int(value) for kind, value in found.items()}) if found else None
