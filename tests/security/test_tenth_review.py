"""Files of strangers that are long and hold nothing: refused soon, whichever reader they come to."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("numpy", reason="numpy is not installed")

from stoker.contract.names import Refusal


@pytest.mark.parametrize("kind", ["jamba", "bamba", "cohere2"])
def test_layers_that_nobody_stores_are_not_counted_one_by_one(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from stoker.training.model.outside_folder import refuse_counts

    with pytest.raises(Refusal, match=r"num_hidden_layers in its config\.json is 1000000000000") as caught:
        refuse_counts({"model_type": kind, "text_config": {"num_hidden_layers": 10**12}}, str(tmp_path))
    assert "\n" not in caught.value.line
    refuse_counts(
        {"num_hidden_layers": 96, "vocab_size": 262_144, "max_position_embeddings": 10_485_760}, str(tmp_path)
    )
