"""What the thirty-sixth review found."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from stoker.contract.names import Refusal
from stoker.training.data import sources

# ---- data sets of the hub ----


@pytest.mark.parametrize("named", ["file://{table}::https://example.org/a", "{table}::hf://datasets/owner/name@main/a", "zip://rows.csv::{packed}::https://example.org/a"])  # fmt: skip
def test_a_chain_of_addresses_has_no_file_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Of file:///PATH::https://… `datasets` opens the path, and of zip://ROWS::PATH::https://… the archive here."""
    datasets, arrow, parquet = map(pytest.importorskip, ("datasets", "pyarrow", "pyarrow.parquet"))
    table, packed, page = tmp_path / "table.parquet", tmp_path / "packed.zip", tmp_path / "name" / "README.md"
    parquet.write_table(arrow.table({"text": ["private"]}), table)
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("rows.csv", "text\nprivate\n")
    page.parent.mkdir()
    path = named.format(table=table, packed=packed)
    page.write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: {path}\n---\n")
    real = datasets.load_dataset_builder

    def builder(name: str, config: str | None, revision: str | None) -> object:
        return real(str(page.parent), config, cache_dir=str(tmp_path / "hf"))  # as if it had been downloaded

    monkeypatch.setattr(datasets, "load_dataset_builder", builder)
    with pytest.raises(Refusal, match="as one of its files, which is not a file of the hub"):
        sources.fetch("owner/name", str(tmp_path / "cache"), lambda line: None)
    assert not (tmp_path / "cache" / "hub").exists()
