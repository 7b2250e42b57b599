#!/usr/bin/env bash
# The whole chain from one command: sets up .venv where that is needed, then trains a model of your own through every stage and writes a report.
#   bash speedrun.sh                 what this machine can do, on the built-in data set; the same command resumes it after a stop
#   bash speedrun.sh --plan          what it would run, and about how long; all options: bash speedrun.sh --help
set -euo pipefail
here=$(CDPATH='' cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
bash "$here/setup.sh"
exec "$here/.venv/bin/stoker" speedrun "$@"
