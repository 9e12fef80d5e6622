# Sourced by demo.sh and tests/run.sh: `build_jobs` prints how many compilers may run at once.
# One takes up to 1.5 GB (the flow graph's templates under ASan), so memory can allow fewer than
# there are cores.
build_jobs() {
  local cores available folder limit used jobs
  cores=$(nproc)
  available=$(( $(awk '/^MemAvailable:/ {print $2}' /proc/meminfo) * 1024 ))
  # A container's limit (cgroup v2, then v1), less what it holds already.
  for folder in /sys/fs/cgroup /sys/fs/cgroup/memory; do
    limit=$(cat "$folder"/memory.max "$folder"/memory.limit_in_bytes 2> /dev/null || true)
    used=$(cat "$folder"/memory.current "$folder"/memory.usage_in_bytes 2> /dev/null || true)
    [[ "$limit" =~ ^[0-9]+$ && "$used" =~ ^[0-9]+$ ]] || continue
    # 19 digits: v1 writes "no limit" as a number near 2^63.
    (( ${#limit} < 19 && limit - used < available )) && available=$(( limit - used ))
  done
  jobs=$(( available / 1500000000 ))
  (( jobs <= cores )) || jobs=$cores
  (( jobs >= 1 )) || jobs=1
  echo "$jobs"
}
