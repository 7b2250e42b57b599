"""Which weights a word means: a folder, a run, a speedrun's stage, a hub id; nothing: the newest run. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from stoker.contract import layout, owners
from stoker.contract.names import EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.settings import suggest
from stoker.contract.shape import shape
from stoker.control.record import again, finder, reader
from stoker.training.checkpoint.folders import steps_in
from stoker.training.checkpoint.manifest import NAME as MANIFEST
from stoker.training.model.families.family import CONFIG
from stoker.training.model.hf_config import ADAPTER
from stoker.training.model.hf_hub import folder_of

HF, RESULT, CHAIN, STAGES = layout.MODEL, "result.json", "chain.json", "stages"
NO_ANSWERS = ("reward",)  # stages whose model gives scores
# Of a speedrun's stages, where chain.json does not say it.
ORDER = ("base", "midtrain", "sft", "reward", "grpo-uniform", "grpo-density")


@shape
class Found:
    folder: str  # weights as transformers writes them, or a checkpoint
    checkpoint: bool = False


def find(where: str | None, stage: str | None, root: str, say: Any, checkpoints: bool = False) -> Found:
    """`checkpoints`: one counts where there is no folder for transformers."""
    if where is None:
        return _newest(root, stage, say)
    where = finder.through_latest(where, say)
    if _has_weights(where):
        if stage:
            raise Refusal(
                f"{where} is a single model: leave --stage {stage} out, or name a speedrun's folder", EX_USAGE
            )
        return Found(where)
    if checkpoints and os.path.exists(os.path.join(where, MANIFEST)):
        return Found(where, checkpoint=True)
    if os.path.isdir(os.path.join(where, STAGES)):
        return _of_speedrun(where, stage, say, checkpoints)
    if not os.path.isdir(where) and "/" in where.strip("/") and not os.path.exists(os.path.join(root, where)):
        return Found(folder_of(where, say))
    run = where if os.path.isdir(where) else finder.find(where, root).dir
    if stage:
        raise Refusal(f"{run} is a single run: leave --stage {stage} out, or name a speedrun's folder", EX_USAGE)
    return _of_run(run, checkpoints, say)


def _has_weights(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in (CONFIG, ADAPTER))


def _of_run(run: str, checkpoints: bool, say: Any) -> Found:
    if _stage_of(run) in NO_ANSWERS and not checkpoints:
        raise Refusal(f"{run} trained a reward model, which gives scores, not answers: name another run", EX_USAGE)
    if _has_weights(os.path.join(run, HF)):
        return Found(os.path.join(run, HF))
    steps = steps_in(os.path.join(run, layout.CHECKPOINTS)) or steps_in(run)
    if steps and checkpoints:
        return Found(next(iter(steps.values())), checkpoint=True)
    if steps:
        raise Refusal(f"{run} has checkpoints but no {HF} folder: `stoker export {run} OUT` makes one", EX_NOINPUT)
    record = reader.load(os.path.realpath(run))
    roles = finder.roles(record) if record is not None else {}
    if (role := _with_model(run, roles, checkpoints)) is not None:
        say(f"{run} is a job: the model of its role {role.name} is used, {os.path.relpath(role.dir)}")
        return _of_run(role.dir, checkpoints, say)
    for one in (record, *roles.values()):
        if one is not None and (host := again.host_of_files(one)):
            done = one.verdict is not None and one.verdict.status == "completed"
            copy = again.advised_copy(one, HF if done else layout.CHECKPOINTS)
            where = f", in {one.dir}" if not copy else ""
            if done:
                line = f"{run} has no model here: its files are on host {host}{where}"
                raise Refusal(line + (f"; to copy the model: {copy}" if copy else ""), EX_NOINPUT)
            line = f"{run} has no model: it is not complete, and what it saved is on host {host}{where}"
            if not again.saved(one):
                raise Refusal(f"{line}; no checkpoint of it is known", EX_NOINPUT)
            made = "`stoker export` makes a model of checkpoints that are here"
            raise Refusal(f"{line}; {made}" + (f"; to copy them: {copy}" if copy else ""), EX_NOINPUT)
    held = ", ".join(sorted(os.listdir(run))[:6]) or "nothing"
    others = _models(os.path.dirname(os.path.realpath(run)), "")
    newest = f" (the newest model of another run there: {os.path.relpath(others[-1])})" if others else ""
    raise Refusal(
        f"{run} has no model: name a folder with {CONFIG} and weights, or a run directory with {HF} in it{newest}; found"
        f" {held}",
        EX_NOINPUT,
    )


def _with_model(job: str, roles: Mapping[str, reader.Run], checkpoints: bool) -> reader.Run | None:
    """The role that has one, or where none has, checkpoints."""
    answering = [run for run in roles.values() if checkpoints or _stage_of(run.dir) not in NO_ANSWERS]
    models = [run for run in answering if _has_weights(os.path.join(run.dir, HF))]
    models = models or [run for run in answering if steps_in(os.path.join(run.dir, layout.CHECKPOINTS))]
    if len(models) > 1:
        each = ", ".join(f"{os.path.relpath(run.dir)} (role {run.name})" for run in models)
        raise Refusal(f"{job} is a job with several models: name one of {each}", EX_USAGE)
    return models[0] if models else None


def _of_speedrun(folder: str, stage: str | None, say: Any, checkpoints: bool) -> Found:
    """By chain.json, or, where that run has no model, the newest run of the stage's name, which is reported."""
    told = _json(os.path.join(folder, CHAIN)).get("stages")
    rows = (
        {str(row["name"]): str(row.get("run") or "") for row in told if isinstance(row, dict) and row.get("name")}
        if isinstance(told, list)
        else {}
    )
    newest = {_name_of(os.path.dirname(path)): path for path in _models(folder, scores=True)}
    # Unknown ones come first: nobody asked for those.
    made = {name: newest[name] for name in sorted(newest, key=lambda name: ORDER.index(name) if name in ORDER else -1)}
    own = {name: path for name, run in rows.items() if run and _has_weights(path := os.path.join(folder, run, HF))}
    models = {name: own.get(name) or made[name] for name in rows if name in own or name in made} or made
    answering = [name for name, path in models.items() if _stage_of(os.path.dirname(path)) not in NO_ANSWERS]
    if stage is not None and stage not in models and checkpoints and rows.get(stage):
        return _of_run(os.path.join(folder, rows[stage]), checkpoints, say)
    if not answering and stage not in models:
        raise Refusal(f"{folder}: no stage of this speedrun has finished a model yet", EX_NOINPUT)
    chosen = answering[-1] if stage is None else stage
    if chosen not in models:
        there = models if checkpoints else answering
        raise Refusal(
            f"{folder}: no model of stage {chosen!r}{suggest(chosen, there)}; stages with a model: {', '.join(there)}",
            EX_NOINPUT,
        )
    run = os.path.dirname(models[chosen])
    if rows and chosen not in own:
        say(f"stage {chosen} has no model with the last settings of {folder}; using {run}, which has other settings")
    return _of_run(run, checkpoints, say)


def _newest(root: str, stage: str | None, say: Any) -> Found:
    """Whichever made a model last; of a speedrun the last stage of its chain, whichever file is newest."""

    def asked_for(path: str) -> bool:
        run = os.path.dirname(path)
        return stage is None or stage in (_stage_of(run), _name_of(run))

    models = {path: "" for path in _models(root, "") if asked_for(path)}
    speedruns = [path for path in _own_folders(root) if os.path.isdir(os.path.join(path, STAGES))]
    models |= {path: speedrun for speedrun in speedruns for path in _models(speedrun) if asked_for(path)}
    if not models:
        which = f"no run of stage {stage}" if stage else "no run"
        raise Refusal(
            f"{which} in {root} has a model: name a folder with {CONFIG} and weights, or train one (`stoker train"
            " pretrain`)",
            EX_NOINPUT,
        )
    newest = max(models, key=_made)
    if not models[newest]:
        return Found(newest)
    named = _name_of(os.path.dirname(newest)) if stage is not None else None
    return _of_speedrun(models[newest], named, say, checkpoints=False)


def _models(folder: str, inside: str = STAGES, scores: bool = False) -> list[str]:
    """hf folders of the runs there that answer, and of jobs' roles, oldest first; `scores`: of reward models, too."""
    runs = _own_folders(os.path.join(folder, inside) if inside else folder)
    roles = [role for run in runs for role in _own_folders(os.path.join(run, layout.ROLES))]
    made = [path for run in (*runs, *roles) if _has_weights(path := os.path.join(run, HF))]
    answering = [path for path in made if scores or _stage_of(os.path.dirname(path)) not in NO_ANSWERS]
    return sorted(answering, key=_made)


def _own_folders(place: str) -> list[str]:
    return [entry.path for entry in os.scandir(place) if _is_own(entry)] if os.path.isdir(place) else []


def _is_own(entry: os.DirEntry[str]) -> bool:
    """Nobody gets a stranger's model without having named it."""
    return owners.is_own(entry.path) and entry.is_dir(follow_symlinks=False)


def _made(folder: str) -> float:
    return max(
        os.path.getmtime(path) for name in (CONFIG, ADAPTER) if os.path.exists(path := os.path.join(folder, name))
    )


def _stage_of(run: str) -> str:
    return str(_json(os.path.join(run, RESULT)).get("stage", ""))


def _name_of(run: str) -> str:
    """base, grpo-density …: a speedrun's runs are called when-NAME-key. Of other runs, the stage."""
    match = re.fullmatch(r"\d{8}-\d{6}-(.+)-[0-9a-f]{8}(-\d+)?", os.path.basename(os.path.realpath(run)))
    return match[1] if match else _stage_of(run)


def _json(path: str) -> dict[str, Any]:
    found = reader.read_json(path)
    return found if isinstance(found, dict) else {}
