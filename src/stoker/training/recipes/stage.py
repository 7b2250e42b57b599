"""What the recipes share: their beginning, and result.json, which is written last: then the stage is done."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from stoker.contract import env_vars
from stoker.contract.errors import EX_NOINPUT, EX_USAGE, Refusal, parsing
from stoker.contract.masking import mask_text
from stoker.contract.safe_io import read_json, write_atomic
from stoker.contract.text import escape_lines
from stoker.control.record import private_folders
from stoker.control.record.metrics_log import read_metrics
from stoker.training.config.derived import derivable
from stoker.training.config.keys import as_yaml
from stoker.training.config.layers import Origin
from stoker.training.config.resolve import flags, on_cpu, recipe_settings
from stoker.training.config.schema import Config
from stoker.training.data.prepare import FORMAT
from stoker.training.data.rows import rows
from stoker.training.data.shards import Prepared
from stoker.training.forensics.culprit import NonFinite
from stoker.training.generate import bits
from stoker.training.generate.exporting import card_of
from stoker.training.loop.learner import Beside
from stoker.training.loop.supervised import BEFORE
from stoker.training.model import hf, hf_config, hf_hub, ready
from stoker.training.model.decoder import Decoder
from stoker.training.parallel.group import Group
from stoker.training.parallel.sharded import shard
from stoker.training.stages.registry import STAGES
from stoker.training.stages.situation import situation, with_context_of_model, with_defaults
from stoker.training.tokenizer.tokenizer import Tokenizer
from stoker.training.tokenizer.tokenizer import load as load_tokenizer

RESULT, TOKENIZER = "result.json", "tokenizer.json"
SCHEMA = 1


def where_runs_go(c: Config) -> str:
    """The run directory; under plain torchrun, which has none, one that the same settings find again and others don't."""
    given = os.environ.get(env_vars.RUN_DIR)
    if given:
        return given
    digest = hashlib.sha256(json.dumps(flags(c)).encode()).hexdigest()[:10]
    return private_folders.own_folder("runs", f"torchrun-{digest}")


def settings(argv: list[str], name: str) -> Config:
    """Checked by the stage's own rules; what nobody gave is derived where it trains."""
    kind = STAGES[name]
    resolved = recipe_settings(argv, torch.cuda.is_available(), say=from_rank_0, defaults=kind.defaults)
    c = resolved.config
    ready.environment(from_rank_0)
    if kind.learning is not None:
        c = with_stage_defaults(name, with_rows_for_model(name, c, resolved.given), resolved.given)
    kind.check(c)
    return c


def _all_given(name: str, given: Mapping[str, Origin]) -> bool:
    """`stoker train` has given every key that can be derived and printed the block; under torchrun the recipe does."""
    return all(key in given for key in derivable(STAGES[name].learning))


def with_rows_for_model(name: str, c: Config, given: Mapping[str, Origin]) -> Config:
    """No longer than what a loaded model was trained for, where nobody gave their length."""
    if _all_given(name, given):
        return c
    return with_context_of_model(name, c, given, on_cpu(c, torch.cuda.is_available()), from_rank_0)


def with_stage_defaults(name: str, c: Config, given: Mapping[str, Origin], prepared: Prepared | None = None) -> Config:
    if _all_given(name, given):
        return c
    at = situation(name, c, int(os.environ.get("WORLD_SIZE", "1")), prepared)
    c, _, lines = with_defaults(name, c, given, at, on_cpu(c, torch.cuda.is_available()))
    for line in lines:
        from_rank_0(line)
    return c


def weights_of(load: str) -> str:
    """The folder with the weights that `model.load` (or another key) names."""
    if not load:
        raise Refusal("no model: name a folder with model.load", EX_USAGE)
    return hf_hub.folder_of(load, from_rank_0)


def tokenizer_of(c: Config) -> Tokenizer:
    return load_tokenizer(tokenizer_folder(c))


def tokenizer_folder(c: Config) -> str:
    return c.tokenizer.path or hf_config.tokenizer_in(weights_of(c.model.load))


def open_model(
    c: Config,
    folder: str,
    device: torch.device,
    asked_bits: str = "16",
    dtype: torch.dtype | None = None,
    say: Callable[[str], None] | None = None,
) -> Decoder:
    """The decoder of a folder as transformers writes it, on its device, ready to run there. `asked_bits`: 4 or auto only
    where it answers and learns nothing.
    """
    if c.model.engine == "transformers":
        raise Refusal(
            "model.engine transformers trains from rows (pretrain, midtrain, sft) and exports: this stage needs model.engine"
            " native",
            EX_USAGE,
        )
    dtype = dtype or ready.dtype_of(c.compute, device)
    ready.arithmetic(c.compute, dtype)
    shape, length = hf_config.shape_of(folder), c.data.context_length
    narrow = bits.four(asked_bits, shape, c.generate.rows, length, device, from_rank_0)
    return (hf.opened_in_4_bits if narrow else hf.opened)(folder, length, dtype, device, say or from_rank_0)


def open_to_ask(c: Config, folder: str, group: Group, asked_bits: str = "16") -> Decoder:
    """The same where nothing learns: whole on every rank; of a model in shards (parallel.strategy fsdp) all ranks make the same
    passes."""
    if not (group.strategy == "fsdp" and group.world > 1):
        return open_model(c, folder, group.device, asked_bits).eval()
    from_rank_0(f"the model is in {group.shards} shards: all ranks answer the same, block by block")
    return open_in_shards(c, folder, group, ready.dtype_of(c.compute, group.device), learns=False).eval()


def open_in_shards(c: Config, folder: str, group: Group, dtype: torch.dtype, *, learns: bool) -> Decoder:
    """The same of which each rank has its part. Passes begin with `hidden`."""
    with torch.device("meta"):
        model = Decoder(hf_config.shape_of(folder), c.data.context_length, dtype)
    if not learns:
        model = model.to(dtype).requires_grad_(False)
    ready.make_ready(model, c.compute, group.device, from_rank_0)
    shard(model, group, dtype, "hidden")
    model.place(group.device, group.home)
    hf.load(model, folder, from_rank_0)
    return model


def rows_of(path: str, key: str) -> list[dict[str, Any]]:
    """A file's rows, whatever its kind."""
    if not path:
        raise Refusal(f"{key} is empty: name a file of rows", EX_USAGE)
    with parsing(f"{key} {path}"):
        values = [row for _, row in rows(path)]
    if not values:
        raise Refusal(f"{key} {path} has no rows", EX_NOINPUT)
    return values


def beside(c: Config, tokenizer: str, digest: str, run: str, chat: bool) -> Beside:
    """What goes beside an export's weights. The tokenizer's files are those of the loaded model where it is the same."""
    own = hf_hub.folder_of(c.model.load, lambda line: None, code=c.model.trust_remote_code) if c.model.load else ""
    words = hf_config.tokenizer_in(own) if own else ""
    if words and os.path.isfile(os.path.join(words, TOKENIZER)) and load_tokenizer(words).has_digest(digest):
        tokenizer = words
    from_elsewhere = bool(own) and not os.path.isfile(os.path.join(os.path.dirname(os.path.realpath(own)), RESULT))
    return Beside(tokenizer, chat and from_elsewhere, card_of(run))


def finish(
    c: Config, stage: str, metrics: dict[str, Any], *, model: str | None = None, more: dict[str, Any] | None = None
) -> None:
    """Rank 0 alone calls this."""
    told = {"schema": SCHEMA, "stage": stage, "metrics": metrics, "model": model, **(more or {})}
    write_atomic(os.path.join(where_runs_go(c), RESULT), json.dumps(told, indent=1).encode())


def write_rows(c: Config, name: str, rows: Iterable[Mapping[str, Any]]) -> str:
    """A jsonl file in the run directory, which is given back."""
    folder = where_runs_go(c)
    os.makedirs(folder, 0o700, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_atomic(os.path.join(folder, name), text.encode())
    return folder


def run_directory(c: Config, group: Group) -> str:
    """Rank 0 makes it, with the settings in it."""
    folder = where_runs_go(c)
    if group.first:
        os.makedirs(folder, 0o700, exist_ok=True)
        write_atomic(os.path.join(folder, "config.yaml"), mask_text(as_yaml(c)).encode())
    return folder


def learned(folder: str, steps: int, tokens: int) -> dict[str, Any]:
    """The numbers of a stage that trained, in this attempt or one before: from the metrics it left."""
    newest: dict[str, Any] = dict.fromkeys(("loss", "val_loss", "val_bits_per_byte", "val_right"))
    for line in read_metrics(folder):
        newest |= {key: line[key] for key in newest if key in line}
    before = os.path.join(folder, BEFORE)  # what train.eval_first measured, if it was asked to
    told = read_json(before) if os.path.exists(before) else {}
    first = {key: told[key] for key in ("val_loss_before", "val_bits_per_byte_before") if key in told}
    return {"steps": steps, "tokens": tokens, **newest, **first}


def from_rank_0(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(escape_lines(mask_text(line)), flush=True)


def of_data(line: str) -> None:
    """What preparing data prints; `stoker train` has told of formats before there were ranks."""
    if env_vars.RUN_DIR not in os.environ or not line.startswith(FORMAT):
        from_rank_0(line)


def run(main: Callable[[list[str]], int], argv: list[str] | None = None) -> int:
    """A recipe's last line. A refusal is one line and a code; a traced NaN is reported already: no frames."""
    try:
        return main(sys.argv[1:] if argv is None else argv)
    except NonFinite as found:
        sys.tracebacklimit = 0  # those of this file and of runpy, too
        raise found.with_traceback(None) from None
    except Refusal as refusal:
        print(mask_text(f"stoker: {refusal.line}"), file=sys.stderr, flush=True)
        return refusal.code
    except KeyboardInterrupt:  # the loop of steps has a handler of its own
        from_rank_0("stopped before the first step: there is nothing to save yet")
        return 128 + signal.SIGINT
    finally:
        gc.freeze()  # Python looks for garbage when it ends: among all that torch is made of, a second of CPU time
