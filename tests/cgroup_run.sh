#!/usr/bin/env bash
# A run inside a memory cgroup, v1 or v2, whichever the machine has; as root. The model is larger
# than the limit, but its weights are holes: it takes no room on the drive, and in memory what any
# other of its size takes. Checks that the plan follows the limit, that the peak stays within it and
# that nothing was killed.
#   bash tests/cgroup_run.sh BUILD_FOLDER [LIMIT_BYTES]
# The limit is 8 GiB unless given.
set -euo pipefail
build=${1:?usage: bash tests/cgroup_run.sh BUILD_FOLDER [LIMIT_BYTES]}
limit=${2:-$((8 << 30))}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if [[ -f /sys/fs/cgroup/cgroup.controllers ]]; then
  version=2 group=/sys/fs/cgroup/colibri-run-$$ limit_file=memory.max kills=memory.events
  echo +memory > /sys/fs/cgroup/cgroup.subtree_control
else
  version=1 group=/sys/fs/cgroup/memory/colibri-run-$$ limit_file=memory.limit_in_bytes
  kills=memory.oom_control
fi
work=$(mktemp -d)
mkdir "$group"
trap 'rm -rf "$work"; rmdir "$group"' EXIT
echo "$limit" > "$group/$limit_file"

"$build/colibri-bench" make-model "$work/model" --layers 16 --experts 256 --hidden 2048 \
  --moe-intermediate 1024 --no-mtp --no-indexer --holes --quiet \
  --tokenizer-from "$root/apps/demo/model"
for ((i = 0; i < 400; ++i)); do echo "Tell me of the year $i."; done > "$work/prompts.txt"

code=0
(
  echo "$BASHPID" > "$group/cgroup.procs"
  exec "$build/colibri-run" -m "$work/model" -i "$work/prompts.txt" --raw --max-tokens 3 \
    --ctx-size 4096 -o "$work/out.jsonl" 2> "$work/notes"
) || code=$?
grep -E "^(plan|memory): |killed" "$work/notes" || cat "$work/notes"
killed=$(awk '$1 == "oom_kill" { print $2 }' "$group/$kills")
lines=$(wc -l < "$work/out.jsonl")
peak=$(awk '/^memory: peak/ { printf "%.0f", $3 * ($4 == "GB" ? 1e9 : 1e6) }' "$work/notes")
echo "cgroup v$version, limit $limit: exit $code, $lines answers, peak $peak, killed ${killed:-0}"
grep -q "(cgroup limit)" "$work/notes"
[[ $code == 0 && $lines == 400 && ${killed:-0} == 0 ]]
((peak < limit))
