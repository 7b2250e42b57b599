"""What happens when a number is no number."""

from __future__ import annotations

from stoker.contract.shape import option, shape


@shape
class NanConfig:
    check: bool = option("look at loss and gradient norm of every step, on the device, one step late", default=True)
    dump: bool = option("write nan_step_N/: parameters, gradients, bad activations, batch, verdict", default=True)
    inject: str = option(
        "a drill: WHERE@STEP[@RANK], e.g. layers.1.attention@5@0 (a NaN in its output), grad:layers.0.mlp.down.weight@5"
        " (an Inf in a gradient)",
        default="",
        metavar="WHERE@STEP",
    )
