"""Finds the model that a word names: a folder, a run, a speedrun's stage, a hub id, or the newest run. No torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from stoker.contract import layout, safe_io
from stoker.contract.errors import EX_NOINPUT, EX_USAGE, Refusal
from stoker.contract.frozen import frozen
from stoker.contract.options import suggest
from stoker.contract.text import escape
from stoker.control.record import resume_command, run_index, run_record
from stoker.training.checkpoint.folders import steps_in
from stoker.training.checkpoint.manifest import NAME as MANIFEST
from stoker.training.model.families.family import CONFIG
from stoker.training.model.hf_config import ADAPTER
from stoker.training.model.hf_hub import folder_of

Say: TypeAlias = Callable[[str], None]
HF, RESULT, CHAIN, STAGES = layout.MODEL, "result.json", "chain.json", "stages"
NO_ANSWERS = ("reward",)  # stages whose model gives scores
# Of a speedrun's stages, where chain.json does not say it.
ORDER = ("base", "midtrain", "sft", "reward", "grpo-uniform", "grpo-density")


@frozen
class Found:
    folder: str  # weights as transformers writes them, or a checkpoint
    checkpoint: bool = False


def find(
    where: str | None,
    stage: str | None,
    root: str,
    say: Say,
    checkpoints: bool = False,
    fetch: Callable[[str, Say], str] = folder_of,
    besides: str = "",
) -> Found:
    """Return the model that a word names. Every command and setting that takes a model calls this.

    It may be a folder with weights, a run (path, id or name), a speedrun's folder or a hub id. `latest`,
    `runs/latest`, `runs/latest/hf` and None name the newest run in `root` that has a model; a line says which.
    A name that several runs have means the newest of them with a model.

    `stage`: a stage of a speedrun, or the stage of the newest run. `checkpoints`: a checkpoint counts where there is no
    folder for transformers, and so does a reward model. `fetch`: makes a folder of a hub id. `besides`: the name of a
    run that is not meant, because it is the one that will load the model.
    """
    if where is None or where == layout.LATEST:
        return _newest(root, stage, say, checkpoints, besides)
    latest = run_index.split_latest(where)
    if latest is not None and latest[1] in ("", HF):
        return _newest(latest[0], stage, say, checkpoints, besides)
    where = run_index.through_latest(where, say)
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
    if os.path.isdir(where):
        run_dir = where
    elif _is_hub_id(where, root):
        return Found(fetch(where, say))
    else:
        run_dir = _run_by_name(where, root, say, checkpoints)
    if stage:
        raise Refusal(f"{run_dir} is a single run: leave --stage {stage} out, or name a speedrun's folder", EX_USAGE)
    return _of_run(run_dir, checkpoints, say)


def find_for_setting(value: str, root: str, say: Say, besides: str = "", scores: bool = False) -> str:
    """Return the folder or hub id for a setting that names a model, as `find` does; a folder that is no run stays as it is.

    `scores`: a reward model is wanted.
    """
    is_latest = run_index.is_latest(value)
    is_run = any(os.path.exists(os.path.join(value, name)) for name in (layout.RUN, STAGES))
    if os.path.isdir(value) and not is_latest and (not is_run or _has_weights(value)):
        return value
    stage = NO_ANSWERS[0] if scores and is_latest else None
    found = find(value, stage, root, say, checkpoints=scores, fetch=lambda name, say: name, besides=besides)
    if found.checkpoint:
        line = f"{found.folder} is a checkpoint: `stoker export {found.folder} OUT` makes a model of it"
        raise Refusal(line, EX_NOINPUT)
    return value if found.folder == value else _from_here(found.folder)


def _is_hub_id(where: str, root: str) -> bool:
    """Whether a word that is not a folder is an id of the hub: not below the runs folder, nor the name of a run there."""
    run = _without_hf(where)
    if "/" not in where.strip("/") or os.path.exists(os.path.join(root, where)):
        return False
    if os.path.realpath(os.path.dirname(run)) == os.path.realpath(root):
        return False
    is_run = run != where and any(run in (one.id, one.name) for one in run_index.own_runs(root))
    return not is_run and run_index.find_role(where, root) is None


def _without_hf(where: str) -> str:
    """RUN of RUN/hf."""
    return where.rstrip("/").removesuffix(f"/{HF}")


def _run_by_name(which: str, root: str, say: Say, checkpoints: bool) -> str:
    """Return the directory of a run; of several with that name, the newest that has a model."""
    try:
        run = run_index.find_run(_without_hf(which), root, say=lambda line: None)
    except Refusal as refusal:
        hint = "; a model may also be a folder with weights or a hub id (owner/name)"
        raise Refusal(refusal.line + hint, refusal.code) from refusal
    namesakes = [one for one in run_index.own_runs(root) if one.name == _without_hf(which)]
    with_model = [one for one in namesakes if _has_model(one.dir, checkpoints)]
    if run.id not in [one.id for one in namesakes] or len(namesakes) == 1 or not with_model:
        return run.dir
    _say_which(with_model[-1].dir, run, say)
    return with_model[-1].dir


def _has_model(run_dir: str, checkpoints: bool) -> bool:
    """Whether a run, or a role of a job, has weights for transformers or, if `checkpoints`, a checkpoint."""
    dirs = [run_dir, *_own_folders(os.path.join(run_dir, layout.ROLES))]
    return any(
        (checkpoints or _stage_of(path) not in NO_ANSWERS)
        and (_has_weights(os.path.join(path, HF)) or (checkpoints and steps_in(os.path.join(path, layout.CHECKPOINTS))))
        for path in dirs
    )


def _from_here(path: str) -> str:
    """Return a path relative to the working directory where it is below it, else as it is."""
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _say_which(run_dir: str, newest: run_record.RunRecord | None, say: Say) -> None:
    """Print which run's model is used. `newest`: the newest run that the word could mean."""
    stage = f" (stage {_stage_of(run_dir)})" if _stage_of(run_dir) else ""
    line = f"using the model of run {escape(_from_here(run_dir))}{stage}"
    parts = os.path.realpath(run_dir).split(os.sep)
    if newest is not None and os.path.basename(os.path.realpath(newest.dir)) not in parts:
        instead = "gives scores, not answers" if _stage_of(newest.dir) in NO_ANSWERS else "has no model"
        line += f", the newest that fits: {escape(newest.id)} ({run_record.run_status(newest)}) {instead}"
    say(line)


def _has_weights(folder: str) -> bool:
    return any(os.path.isfile(os.path.join(folder, name)) for name in (CONFIG, ADAPTER))


def _of_run(run: str, checkpoints: bool, say: Say) -> Found:
    if _stage_of(run) in NO_ANSWERS and not checkpoints:
        raise Refusal(f"{run} trained a reward model, which gives scores, not answers: name another run", EX_USAGE)
    if _has_weights(os.path.join(run, HF)):
        return Found(os.path.join(run, HF))
    steps = steps_in(os.path.join(run, layout.CHECKPOINTS)) or steps_in(run)
    if steps and checkpoints:
        return Found(next(iter(steps.values())), checkpoint=True)
    if steps:
        raise Refusal(f"{run} has checkpoints but no {HF} folder: `stoker export {run} OUT` makes one", EX_NOINPUT)
    record = run_record.load_run(os.path.realpath(run))
    roles = run_index.list_roles(record) if record is not None else {}
    if (role := _with_model(run, roles, checkpoints)) is not None:
        say(f"{run} is a job: the model of its role {role.name} is used, {os.path.relpath(role.dir)}")
        return _of_run(role.dir, checkpoints, say)
    for one in (record, *roles.values()):
        if one is not None and (host := resume_command.host_of_files(one)):
            done = one.verdict is not None and one.verdict.status == "completed"
            copy = resume_command.copy_command(one, HF if done else layout.CHECKPOINTS)
            where = f", in {one.dir}" if not copy else ""
            if done:
                line = f"{run} has no model here: its files are on host {host}{where}"
                raise Refusal(line + (f"; to copy the model: {copy}" if copy else ""), EX_NOINPUT)
            line = f"{run} has no model: it is not complete, and what it saved is on host {host}{where}"
            if not resume_command.saved_state(one):
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


def _with_model(job: str, roles: Mapping[str, run_record.RunRecord], checkpoints: bool) -> run_record.RunRecord | None:
    """The role that has one, or where none has, checkpoints."""
    answering = [run for run in roles.values() if checkpoints or _stage_of(run.dir) not in NO_ANSWERS]
    models = [run for run in answering if _has_weights(os.path.join(run.dir, HF))]
    models = models or [run for run in answering if steps_in(os.path.join(run.dir, layout.CHECKPOINTS))]
    if len(models) > 1:
        each = ", ".join(f"{os.path.relpath(run.dir)} (role {run.name})" for run in models)
        raise Refusal(f"{job} is a job with several models: name one of {each}", EX_USAGE)
    return models[0] if models else None


def _of_speedrun(folder: str, stage: str | None, say: Say, checkpoints: bool) -> Found:
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


def _newest(root: str, stage: str | None, say: Say, checkpoints: bool, besides: str) -> Found:
    """Return the model of the run that was started last among those that have one; of a speedrun its last stage's."""

    def is_meant(path: str) -> bool:
        run = os.path.dirname(path)
        return stage is None or stage in (_stage_of(run), _name_of(run))

    runs = [run for run in run_index.own_runs(root) if not besides or besides not in (run.name, run.id)]
    run_of = {os.path.realpath(run.dir): run for run in runs}
    when: dict[str, float] = {}  # of each model: when its run was started, or where that is unknown, when it was made
    for path in _models(root, "", scores=checkpoints or stage in NO_ANSWERS):
        run = run_of.get(_run_dir_of(path, root))
        if is_meant(path) and (run is not None or not _is_recorded(path, root)):
            when[path] = run.started if run is not None and run.started else _made(path)
    of_speedrun: dict[str, str] = {}
    for speedrun in (path for path in _own_folders(root) if os.path.isdir(os.path.join(path, STAGES))):
        of_speedrun |= {path: speedrun for path in _models(speedrun) if is_meant(path)}
    when |= {path: _made(path) for path in of_speedrun}
    saved: set[str] = set()
    for run in runs if checkpoints and stage is None else ():
        steps = steps_in(os.path.join(run.dir, layout.CHECKPOINTS))
        if steps and not _has_weights(os.path.join(run.dir, HF)):
            saved.add(steps[max(steps)])
            when[steps[max(steps)]] = run.started
    last = runs[-1] if runs else None
    if last is not None and not _has_model(last.dir, checkpoints) and resume_command.host_of_files(last):
        completed = last.verdict is not None and last.verdict.status == "completed"
        if completed or not when:
            return _of_run(last.dir, checkpoints, say)  # raises Refusal: what it has made is on another host
    if not when:
        which = f"no run of stage {stage}" if stage else "no run"
        raise Refusal(
            f"{which} in {root} has a model: name a folder with {CONFIG} and weights, or train one (`stoker train"
            " pretrain`)",
            EX_NOINPUT,
        )
    newest = max(when, key=lambda path: when[path])
    if newest in of_speedrun:
        named = _name_of(os.path.dirname(newest)) if stage is not None else None
        found = _of_speedrun(of_speedrun[newest], named, say, checkpoints=False)
        _say_which(os.path.dirname(found.folder), None, say)
        return found
    is_checkpoint = newest in saved
    run_dir = os.path.dirname(os.path.dirname(newest)) if is_checkpoint else os.path.dirname(newest)
    _say_which(run_dir, last if stage is None else None, say)
    return Found(newest, is_checkpoint)


def _run_dir_of(model: str, root: str) -> str:
    """Return the directory below `root` that holds a model: that of the run, or of the job whose role made it."""
    top = os.path.realpath(root)
    return os.path.join(top, os.path.relpath(os.path.realpath(model), top).split(os.sep)[0])


def _is_recorded(model: str, root: str) -> bool:
    return os.path.exists(os.path.join(_run_dir_of(model, root), layout.RUN))


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
    """Return whether this is a folder of this user: other users' models are used only if they are named."""
    return safe_io.is_own(entry.path) and entry.is_dir(follow_symlinks=False)


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
    found = run_record.read_json(path)
    return found if isinstance(found, dict) else {}
