"""Causes data.*: problems with the files and data that the script reads and writes."""

from __future__ import annotations

import os
import re
import shlex
import signal

from stoker.contract.units import format_bytes
from stoker.control.verdict.catalogue import CATALOGUE, Case, CauseMatch, Family, Match
from stoker.control.verdict.echo import lost_loader_worker
from stoker.control.verdict.exit_text import (
    at_location,
    extract_searched_text,
    find_in_output,
    first_line,
    line_evidence,
    line_of,
    path_in,
    shm_evidence,
)
from stoker.control.verdict.rules.memory import describe_memory_trend

ORDER = 50

_SMALL_SHM = 2**30
_ALONE = "num_workers=0 runs the data set in the rank itself: the verdict then shows its exception with its line"


_INCOMPLETE = "the file that was being written is incomplete: resume from the one before"
# Stoker's own messages name the folder. The operating system's error has a path only if a file could not be opened.
_FULL_PATHS = (r"not written in (/[^\n]{1,400}?): no space", r"no space left: (/[^\n]{1,400}?) needs ")

family = Family(__name__, line_evidence, ALONE=_ALONE, INCOMPLETE=_INCOMPLETE)


family.entries(r"""
data.too-many-files: The rank has as many open files as its limit allows.
  said: \[Errno 24\]|Too many open files|received 0 items of ancdata|os error 24
  summary: {who}: too many open files (ulimit -n){at}
  seen: errno 24 (EMFILE), "Too many open files", or "received 0 items of ancdata" from a data loader
  fix: ulimit -n 65536   # in the shell that starts stoker; docker run --ulimit nofile=65536:65536
  fix: torch.multiprocessing.set_sharing_strategy('file_system'): then tensors of a worker need no descriptors
  fix: open files once per worker and close them; one memory-mapped file per shard adds up
""")


@family.cause(r"""
data.shm: Shared memory is too small for what the data loader's workers send.
  perhaps: insufficient shared memory|unable to (?:(?:allocate|open) shared memory|(?:write to|
      resize) file </torch_)[^\n]*
  seen: torch's shared memory between loader and workers could not be created ("insufficient shared memory (shm)",
      "unable to allocate shared memory"), or a bus error of the rank or a worker, with a /dev/shm that is below 1 GiB
      or nearly full
  unless: a bus error with a large, empty /dev/shm: a mapped file that was cut off (data.worker-died, rank.crash).
      NCCL's segments: nccl.shm
  fix: docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir with medium: Memory on /dev/shm (docker's
      default is 64 MB)
  fix: stoker clean   # shows segments that dead runs left there
  fix: use less shared memory: fewer workers, prefetch_factor=1, smaller batches; or num_workers=0
  fix: torch.multiprocessing.set_sharing_strategy('file_system') if file descriptors, not bytes, run out
""")
def match_shm(case: Case, match: Match | None) -> CauseMatch | None:
    context = case.context
    bus_error = find_in_output(case, r"DataLoader worker \(pid \d+\) is killed by signal: Bus error[^\n]*")
    # Judge by the size rather than by the free bytes: when the agent reads them, the workers have exited and freed theirs.
    is_small = context.shm_total is not None and (
        context.shm_total < _SMALL_SHM or (context.shm_free or 0) * 10 < context.shm_total
    )
    shm_free = shm_evidence(context)
    suffix = f" ({shm_free[0]})" if shm_free else ""
    if match:
        summary = f"{case.rank_name}: no shared memory left for the data loader{suffix}"
        return CauseMatch(summary, (*line_evidence(case, line_of(match)), *shm_free))
    if bus_error and (is_small or context.shm_total is None):
        summary = f"a data-loader worker of {case.rank_name} died of a bus error: out of shared memory{suffix}"
        return CauseMatch(summary, (*line_evidence(case, line_of(bus_error)), *shm_free))
    if case.end.code == -signal.SIGBUS and is_small:
        summary = f"{case.rank_name} died of a bus error: out of shared memory{suffix}"
        return CauseMatch(summary, ("wait status: killed by SIGBUS", *shm_free))
    return None


@family.cause(r"""
data.worker-died, again: A worker process of the data loader died.
  perhaps: DataLoader worker \(pid (\d+)\) (?:is killed by signal: [^.\n]+|exited unexpectedly with exit code \d+)
  seen: "DataLoader worker (pid …) exited unexpectedly" or "is killed by signal"; or its pipe broke while it sent a
      batch (EOFError and the like)
  unless: the kernel killed it because memory ran out: oom.host. A bus error with a small /dev/shm: data.shm. An exception
      in the worker has its own type
  fix: {ALONE}
  fix: Killed: SIGKILL comes from outside the process: the kernel when memory runs out (dmesg on the host shows that; then
      use fewer workers), a limit on CPU time (ulimit -t), a job manager or a person
  fix: aborted or a segmentation fault: a library that can't be used after a fork (multiprocessing_context='spawn'), or a
      broken file
""")
def match_worker_died(case: Case, match: Match | None) -> CauseMatch | None:
    # Search the causes of the exception, too: the one with the signal is the one that this was raised from.
    match = match or find_in_output(case, r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly")
    error = case.end.error
    if not match and error is not None and lost_loader_worker(error):
        raised = f"{error.type}{': ' + first_line(error.message) if error.message.strip() else ''}"
        evidence = (*line_evidence(case, raised), *describe_memory_trend(case.context))
        return CauseMatch(f"a data-loader worker of {case.rank_name} died while it sent a batch ({raised})", evidence)
    if not match:
        return None
    how, fix = "exited unexpectedly", CATALOGUE["data.worker-died"].fix
    alone, killed, crashed = fix
    if status := re.search(r"is killed by signal: ([^.\n]+)|with exit code (\d+)", match[0]):
        if status[1]:
            how = f"was killed by a signal: {status[1]}"
            fix = (alone, killed if status[1] == "Killed" else crashed)
        else:
            how = f"ended with exit code {status[2]}"
            fix = (alone,)
    summary = f"a data-loader worker (pid {match[1]}) of {case.rank_name} {how}"
    return CauseMatch(summary, (*line_evidence(case, line_of(match)), *describe_memory_trend(case.context)), fix)


@family.cause(r"""
data.no-space: The disk, or a quota, is full.
  said: \[Errno 28\]|\[Errno 122\]|[Nn]o space left(?: on device|: )|Disk quota exceeded|os error (?:28|122)\b|
      inline_container\.cc:\d+\] \. unexpected pos \d+ vs \d+|PytorchStreamWriter failed writing|
      \d+ requested and \d+ written
  seen: errno 28 (ENOSPC) or 122 (EDQUOT), "No space left on device"; torch.save's "unexpected pos" or
      "PytorchStreamWriter failed writing file", numpy's "requested and … written"
  unless: the device is /dev/shm: data.shm or nccl.shm
  fix: df -h and df -i on that folder (bytes and files), and the quota: quota -s
  fix: keep fewer checkpoints; stoker clean --cache shows data and compile caches and their size
  fix: {INCOMPLETE}
""")
def match_no_space(case: Case, match: Match) -> CauseMatch:
    line, text = line_of(match), extract_searched_text(case)
    path = path_in(line) or next((path[1] for pattern in _FULL_PATHS if (path := re.search(pattern, text))), "")
    disks = case.context.full_disks
    if os.path.isabs(path):
        holding = [disk for disk in disks if os.path.commonpath([path, disk[0]]) == disk[0]]
        disks = tuple(sorted(holding, key=lambda disk: len(disk[0]))[-1:])
    full_disks = [f"{mount} ({format_bytes(free)} of {format_bytes(total)} free)" for mount, free, total in disks]
    complete = _find_complete_outputs(case)
    summary = f"{case.rank_name}: no space left{f' for {path}' if path else ''}{at_location(case)}"
    if full_disks:
        summary += f"; full: {', '.join(full_disks)}"
    if complete:
        summary += f"; complete: {', '.join('/'.join(output.rsplit('/', 2)[1:]) for output in complete)}"
    usable = tuple(f"complete, and safe to use: {output}" for output in complete)
    df = f"df -h {shlex.quote(path or disks[0][0])}" if path or disks else "df -h"
    check = f"{df}; the same with df -i (number of files), and the quota: quota -s"
    fix = (check, CATALOGUE["data.no-space"].fix[1], *(() if complete else (_INCOMPLETE,)))
    return CauseMatch(summary, (*line_evidence(case, line), *usable), fix)


def _find_complete_outputs(case: Case) -> list[str]:
    """Return the paths of the newest complete checkpoint and of the models that ranks reported as written."""
    paths = []
    checkpoint = case.evidence.checkpoint
    # A folder is only a checkpoint once its manifest is written. A single file may be the one that could not be written.
    if checkpoint is not None and not os.path.splitext(checkpoint.path)[1]:
        paths.append(checkpoint.path)
    for end in case.evidence.ends:
        paths += re.findall(r"\bwrote (/[^\n]{1,400}?): [\d.]+ [KMGT]i?B of ", end.tail)
    return paths


_CHECKPOINTS = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_BINARY = (".gz", ".npy", ".npz", ".zip", ".parquet")  # other files may be a git-lfs pointer or an HTML page


@family.cause(r"""
data.corrupt: A checkpoint or a data file is damaged, or not the kind of file it should be.
  perhaps: Error while deserializing header[^\n]*|MetadataIncompleteBuffer|InvalidHeader|
      PytorchStreamReader failed [^\n.]*|invalid load key, '[^\n]*|pickle data was truncated|
      WeightsUnpickler error:\s+Unsupported operand \d+|File is not a zip file|Bad magic number for|
      is not a valid JSON file|Failed to read all data for array[^\n]*|[^\n:]*Parquet magic bytes not found[^\n]*|
      Compressed file ended before the end-of-stream[^\n]*
  seen: a reader reports that the file is incomplete or of another kind: safetensors' header, torch's zip archive, a
      pickle, a zip, a JSON or Parquet file
  unless: a pickle with classes that torch won't load (weights_only): the file is complete. An EOFError or JSON error of
      a stream, without a file: rank.exception
  fix: ls -l the file; compare size and sha256sum with the source: 0 bytes or too few mean a write or download that was
      cut off
  fix: a text that begins with `version https://git-lfs` is a pointer: git lfs pull. An HTML page is a failed download
  fix: a checkpoint: resume from the one before; write to another name, then rename, so that an incomplete file is never loaded
""")
def match_corrupt_file(case: Case, match: Match | None) -> CauseMatch | None:
    if not match and not _is_cut_off(case):
        return None
    error = case.end.error
    problem = f"{error.type}: {first_line(error.message) or 'the file ends too early'}" if error else ""
    if match:
        problem = first_line(re.sub(r"\s+", " ", match[0]))
    line = line_of(match) if match else problem
    file = _find_damaged_file(case, line)
    lfs = " (a git-lfs pointer?)" if "invalid load key, 'v'" in problem or "Unsupported operand 118" in problem else ""
    summary = f"{case.rank_name}: {file or 'a file'} is damaged: {problem}{lfs}{at_location(case)}"
    general, pointer, checkpoint = CATALOGUE["data.corrupt"].fix
    fix = (
        general.replace("the file", shlex.quote(file), 1) if file else general,
        *((pointer,) if lfs or not file.endswith(_BINARY) else ()),
        *((checkpoint,) if not file or file.endswith(_CHECKPOINTS) else ()),
    )
    return CauseMatch(summary, line_evidence(case, line), fix)


def _find_damaged_file(case: Case, line: str) -> str:
    """Return the path in the message, else the first file in the variables of the code that failed, or ""."""
    path = re.search(r"'(/[^'\n]{1,400})'", line)
    files = case.end.error.files if case.end.error is not None else ()
    return path[1] if path else next(iter(files), "")


def _is_cut_off(case: Case) -> bool:
    """Return whether the traceback shows that a file ended too early while it was read."""
    error = case.end.error
    if error is None:
        return False
    if error.type == "EOFError":
        return bool(
            re.search(r"torch/serialization\.py|_weights_only_unpickler|pickle\.load\(|np\.load\(", error.traceback)
        )
    if error.type == "OSError" and "[Errno 22]" in error.message:
        return "PyTorchFileReader(" in error.traceback  # torch.load() of a truncated archive
    # json.loads() doesn't count: it may have parsed a server's reply rather than a file.
    return error.type == "JSONDecodeError" and (
        bool(error.files) or bool(re.search(r'json/__init__\.py", line \d+, in load\n', error.traceback))
    )


family.entries(r"""
data.network-fs, again: The file system failed: a network mount, or a disk.
  said: \[Errno (?:116|5|121)\][^\n]*|Stale file handle|Transport endpoint is not connected: '[^\n]*|os error (?:116|
      5|121)\b
  summary: {who}: the file system failed{at_path}: {line}
  seen: errno 116 (ESTALE, stale file handle), 5 (EIO), 121 (EREMOTEIO), or 107 (transport endpoint is not connected)
      on a file
  unless: a socket's error: rank.exception
  fix: the file system's server, a mount or a disk failed: dmesg, df on that folder; remount it
      after a stale handle
  fix: a FUSE mount (s3fs, gcsfuse, rclone) whose process died must be mounted again
  fix: data on a local disk survives a server's restart
""")


@family.cause(r"""
data.permission: The script may not read or write a file.
  said: \[Errno (?:13|30)\] [^\n]*: '[^\n]*
  seen: errno 13 (EACCES) or 30 (EROFS, read-only file system) with a path
  unless: a permission that is not about a file: rank.exception
  fix: ls -ld the file and its folders, and id: which user runs the ranks, on which host?
  fix: another user's cache: set HF_HOME and TORCH_HOME to a folder that you own; a container's user is not the
      host's
""")
def match_permission(case: Case, match: Match) -> CauseMatch:
    reason = "read-only file system" if "Errno 30" in match[0] else "permission denied"
    return CauseMatch(f"{case.rank_name}: can't open {path_in(match[0])}: {reason}", line_evidence(case, match[0]))


@family.cause(r"""
data.file-missing: A file that the script needs does not exist.
  perhaps: \[Errno 2\] No such file or directory: '|is not a local folder and is not a valid model identifier|
      does not appear to have a file named
  seen: a FileNotFoundError with a path, or a model that neither the Hugging Face hub nor the disk has
  unless: the file is a program that subprocess could not start: rank.exception. A library: env.version
  fix: is the path right from where the ranks start (the folder stoker was started in), and the same on every host?
  fix: is the disk mounted, and the download or preparation step done? if rank 0 prepares what the others already open, that
      is a race: put a barrier between them
  fix: a model by its hub name: logged in (HF_TOKEN), online (HF_HUB_OFFLINE unset), spelled right?
""")
def match_missing_file(case: Case, match: Match | None) -> CauseMatch | None:
    error = case.end.error
    if not match and not (error is not None and error.type == "FileNotFoundError" and error.message.strip()):
        return None
    if error is not None and re.search(r"subprocess\.py\", line \d+, in _execute_child", error.traceback):
        return None
    line = line_of(match) if match else first_line(extract_searched_text(case))
    path = path_in(line)
    missing = f"{path} does not exist" if path else first_line(line)
    return CauseMatch(f"{case.rank_name}: {missing}", line_evidence(case, line))
