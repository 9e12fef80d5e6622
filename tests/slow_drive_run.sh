#!/usr/bin/env bash
# The demo on a drive that the kernel slows down (cgroup v1 or v2, whichever the machine has; as
# root): the answers have to be those of the drive as it is, and one signal has to end the run.
#   bash tests/slow_drive_run.sh BUILD_FOLDER [BYTES_PER_SECOND]
# 5 MB/s unless given: half a minute.
set -euo pipefail
build=${1:?usage: bash tests/slow_drive_run.sh BUILD_FOLDER [BYTES_PER_SECOND]}
rate=${2:-5000000}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model=$root/apps/demo/model
device=$(findmnt -no MAJ:MIN -T "$model")

if [[ -f /sys/fs/cgroup/cgroup.controllers ]]; then
  version=2 group=/sys/fs/cgroup/colibri-slow-$$ limit="io.max" value="$device rbps=$rate"
  echo +io > /sys/fs/cgroup/cgroup.subtree_control
else
  version=1 group=/sys/fs/cgroup/blkio/colibri-slow-$$
  limit="blkio.throttle.read_bps_device" value="$device $rate"
fi
work=$(mktemp -d)
mkdir "$group"
trap 'rm -rf "$work"; rmdir "$group"' EXIT
echo "$value" > "$group/$limit"

for ((i = 0; i < 6; ++i)); do echo "Tell me of the year $i."; done > "$work/prompts.txt"
run=("$build/colibri-run" -m "$model" -i "$work/prompts.txt" --ram 200MB --slots 25% --direct on
     --max-tokens 8 --no-prediction)
# What belongs to an answer, whatever else its record tells.
answers() {
  jq -cS '[.custom_id, .response.status_code, .response.body.choices, .response.body.usage]' "$1" |
    sort
}

"${run[@]}" -o "$work/fast.jsonl" 2> "$work/fast"
code=0
(
  echo "$BASHPID" > "$group/cgroup.procs"
  exec "${run[@]}" -o "$work/slow.jsonl" 2> "$work/slow"
) || code=$?
grep -h " read, " "$work/fast" "$work/slow"
cmp <(answers "$work/fast.jsonl") <(answers "$work/slow.jsonl")

interrupted=0
(
  echo "$BASHPID" > "$group/cgroup.procs"
  exec timeout --preserve-status -s TERM 2 "${run[@]}" -o "$work/cut.jsonl" --max-seqs 1 \
    2> "$work/cut"
) || interrupted=$?
"${run[@]}" -o "$work/cut.jsonl" --resume 2> "$work/resumed"
cmp <(answers "$work/fast.jsonl") <(answers "$work/cut.jsonl")
echo "cgroup v$version, $rate bytes/s: exit $code, interrupted $interrupted, the same answers"
[[ $code == 0 && $interrupted == 130 ]]
