"""One readable script per stage, started as the ranks of a run."""

import os

from stoker.contract import env_vars

if os.environ.pop(env_vars.EARLY_CONTEXT, ""):  # not for programs that a rank starts
    from stoker.training.recipes.context import begin

    begin()
