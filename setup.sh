#!/usr/bin/env bash
# Creates or updates .venv, the Python environment of this checkout. Does nothing if nothing has changed.
#   bash setup.sh           installs Stoker and torch
#   bash setup.sh --test    also installs what test.sh needs
# PYTHON=python3.12         the Python to use (default: python3). If it has torch 2.9 or later, .venv uses that torch.
# STOKER_SETUP_TORCH=skip   installs neither torch nor what needs it: enough for launching, static checks and tests without torch.
set -euo pipefail
CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")"

say() { printf 'setup: %s\n' "$*"; }
refuse() { # prints one line and exits: refuse CODE LINE
  printf 'setup.sh: %s\n' "$2" >&2
  exit "$1"
}

case "$*" in
  '') extent=plain ;;
  --test) extent='test' ;;
  *) refuse 64 "unknown arguments: $*; usage: bash setup.sh [--test]" ;;
esac
case "${STOKER_SETUP_TORCH:-}" in
  '' | skip) ;;
  *) refuse 64 "STOKER_SETUP_TORCH is '$STOKER_SETUP_TORCH'; leave it unset or set it to skip" ;;
esac

# If .venv is active, python3 is its own Python, which can't rebuild .venv: remove it from PATH.
path_without_venv=
IFS=: read -ra entries <<<"$PATH"
for entry in "${entries[@]}"; do
  [[ $entry -ef .venv/bin ]] || path_without_venv+="${path_without_venv:+:}$entry"
done
export PATH="$path_without_venv"

python=${PYTHON:-python3}
command -v "$python" >/dev/null || refuse 69 "$python not found; install Python 3.11, 3.12 or 3.13, or choose one: PYTHON=/path/to/python3.12 bash setup.sh"
command -v flock >/dev/null || refuse 69 "flock not found; install util-linux"

# Even a very old Python must be able to run this up to its refusal. Reads torch's version from its metadata: importing torch takes seconds.
# Prints the packages folder of a Python in a virtual environment: --system-site-packages would skip that environment.
facts=$("$python" - "$python" <<'PY'
import sys

def refuse(line):
    sys.stderr.write("setup.sh: %s is Python %d.%d.%d%s\n" % ((sys.argv[1],) + tuple(sys.version_info[:3]) + (line,)))
    sys.exit(69)

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    refuse("; Stoker needs 3.11, 3.12 or 3.13: install one of them, or choose one: PYTHON=/path/to/python3.12 bash setup.sh")

import importlib.metadata, importlib.util, os, re, sysconfig

if os.path.realpath(sys.prefix) == os.path.realpath(".venv"):
    refuse(" of .venv itself; choose another one: PYTHON=/usr/bin/python3 bash setup.sh")
if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
    refuse(" without its venv module; on Debian and Ubuntu: apt-get install python%d.%d-venv" % sys.version_info[:2])

torch = ""
if importlib.util.find_spec("torch"):
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        pass  # a folder that is called torch but is not the package
numbers = re.match(r"(\d+)\.(\d+)", torch)
if not numbers or tuple(map(int, numbers.groups())) < (2, 9):
    torch = ""
print(sys.executable)
print("%d.%d.%d" % sys.version_info[:3])
print(torch)
print(sysconfig.get_path("purelib") if sys.prefix != sys.base_prefix else "")
PY
)
mapfile -t facts <<<"$facts"
executable=${facts[0]} version=${facts[1]} found_torch=${facts[2]-} base_packages=${facts[3]-}
[[ -z ${STOKER_SETUP_TORCH:-} ]] || found_torch=

stamp=.venv/setup.stamp
base="$PWD, $executable, Python $version, torch ${STOKER_SETUP_TORCH:-${found_torch:-ours}}"
files=$(cat pyproject.toml constraints.txt setup.sh | sha256sum)

read_stamp() {
  was_base='' was_files='' was_extent=''
  if [[ -f $stamp ]]; then
    { read -r was_base && read -r was_files && read -r was_extent; } <"$stamp" || was_base=''
  fi
}
finished() {
  read_stamp
  [[ $was_base == "$base" && $was_files == "$files" && ($was_extent == "$extent" || $was_extent == test) &&
    -x .venv/bin/python && -x .venv/bin/stoker ]]
}
if finished; then exit 0; fi

# pip inherits the lock: if this script is killed, the next one waits until that pip has ended, too.
# The lock file is not readable for others, who could lock it and so block the setup.
(umask go-r && : >>.venv.lock)
if [[ -O .venv.lock ]]; then chmod go-r .venv.lock; fi
exec 9>.venv.lock
if ! flock --nonblock 9; then
  say "waiting for another setup.sh in this checkout"
  flock 9
fi
if finished; then exit 0; fi

started=$SECONDS
make_venv() {
  local venv_options=(--clear) output
  if [[ -e .venv ]]; then say ".venv is incomplete or has other settings: creating it again"; fi
  say "creating .venv with Python $version"
  if [[ -n $found_torch ]]; then
    say "using torch $found_torch of $executable"
    venv_options+=(--system-site-packages)
  fi
  output=$("$executable" -m venv "${venv_options[@]}" .venv 2>&1) || refuse "$?" "$executable -m venv failed: $output"
  if [[ $version == 3.11.* ]]; then
    # This venv comes with setuptools 65, which would hide the newer version of the base Python that its torch needs.
    output=$(.venv/bin/python -m pip --disable-pip-version-check uninstall --yes setuptools 2>&1) || refuse "$?" "removing setuptools from .venv failed: $output"
  fi
  # The pip of Python 3.11 takes twice as long to read the package index.
  output=$(.venv/bin/python -m pip --disable-pip-version-check --no-input install --quiet --no-compile 'pip>=25.3' 2>&1) ||
    say "pip could not be updated, so the one of Python $version is used: ${output##*$'\n'}"
  if [[ -n $found_torch && -n $base_packages ]]; then
    .venv/bin/python -c 'import sys, sysconfig; print(sys.argv[1], file=open(sysconfig.get_path("purelib") + "/below.pth", "w"))' "$base_packages"
  fi
}
rm -f "$stamp"
if [[ $was_base == "$base" && -x .venv/bin/python ]]; then
  if [[ $was_extent == test ]]; then extent='test'; fi
else
  make_venv
fi

constraints=constraints.txt
if [[ -n $found_torch ]]; then
  # Don't pin what that Python already has: a second copy would replace the version that its torch was tested with.
  constraints=.venv/constraints.txt
  .venv/bin/python - "$found_torch" >"$constraints" <<'PY'
import importlib.metadata, re, sys
from pathlib import Path

def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()

have = {canonical(d.metadata["Name"] or "") for d in importlib.metadata.distributions() if not Path(d.locate_file("")).is_relative_to(sys.prefix)}
if "torch" not in have:
    sys.exit("setup.sh: .venv can't use torch %s; to install another torch: PYTHON=/path/to/a/python/without/torch bash setup.sh" % sys.argv[1])
print("torch==" + sys.argv[1])
for line in Path("constraints.txt").read_text().splitlines():
    if not line.startswith("#") and canonical(line.split("==")[0]) not in have:
        print(line)
PY
fi

# Extras of pyproject.toml, and their description for the terminal.
case "$extent ${STOKER_SETUP_TORCH:-${found_torch:+found}}" in
  'plain ') extras='[train,show]' what='stoker and torch (takes minutes the first time)' ;;
  'plain found') extras='[parts,show]' what='stoker and what training needs' ;;
  'plain skip') extras='[show]' what='stoker' ;;
  'test ') extras='[train,test]' what='stoker, torch and what test.sh needs (takes minutes the first time)' ;;
  'test found') extras='[test]' what='stoker and what test.sh needs' ;;
  'test skip') extras='[check]' what='stoker and what test.sh needs without torch' ;;
esac
say "installing $what"
log=.venv/setup.log rc=0
.venv/bin/python -m pip --disable-pip-version-check --no-input install --no-compile --constraint "$constraints" --editable ".$extras" >"$log" 2>&1 || rc=$?
if ((rc)); then
  tail -n 20 "$log" >&2
  refuse "$rc" "installing $what failed; pip's full output is in $log"
fi

# Compile on all cores: pip would compile 15,000 files on one. Files that don't compile are for another Python version; the log lists them.
# Skip a third of the files: packages' own tests, and transformers' 540 architectures, of which a process imports one or two.
# With --test nothing is compiled here: the tests import only a tenth of the rest, and mypy uses the other core.
rarely_imported='/site-packages/.*/tests?/|/site-packages/transformers/models/'
if [[ $extent == plain ]]; then
  .venv/bin/python -m compileall -q -j 0 -x "$rarely_imported" "$PWD/.venv/lib" >>"$log" 2>&1 || true
fi

printf '%s\n' "$base" "$files" "$extent" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done in $((SECONDS - started)) s"
if [[ $extent == plain ]]; then say "next: . .venv/bin/activate && stoker doctor"; fi
