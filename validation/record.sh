#!/usr/bin/env bash
# Records a GPU run: bash validation/record.sh OUTPUT_PREFIX
# From a clean commit, with the wheel installed and the source folder out of the import path.
# Each file says what was run and ends with its summary. ONLY="speed memcheck" records these alone.
set -uo pipefail
prefix=$1

header() {
  python3 -P - "$1" <<'PY'
import datetime, platform, subprocess, sys
import torch, fused_logp_hub
from fused_logp_hub._manifest import shipped
driver = subprocess.run(
    ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
).stdout.strip().splitlines()
m = shipped()
print(f"command   {sys.argv[1]}\ncommit    {m.source_commit}{' (dirty)' if m.dirty else ''}\ndate      {datetime.date.today()}\ncard      {'; '.join(driver)}")
print(f"versions  python {platform.python_version()}, torch {torch.__version__}, fused-logp-hub {fused_logp_hub.__version__}")
print(f"kernels   {m.compiler['name']} {m.compiler['version']}, {len(m.cubins)} cubins\n")
PY
}

wanted() { [[ -z ${ONLY:-} || " $ONLY " == *" $1 "* ]]; }

record() {  # name, command, lines of its output to keep
  wanted "$1" || return 0
  local file="$prefix.$1.txt"
  header "$2" > "$file"
  bash -c "$2" > "$file.log" 2>&1
  echo "exit status $?" >> "$file.log"
  tail -n "$3" "$file.log" >> "$file"
  tail -n 4 "$file"
  rm "$file.log"
}

# cuda-bindings probes the driver for entry points it may lack, so API errors are not reported. initcheck has to
# see PyTorch's kernels write the inputs; the others look at this package's only, or they would take an hour.
sanitize="PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --report-api-errors no"
ours="--kernel-name kernel_substring=logp_"
record tests "python3 -P -m pytest --require-gpu -q -rs -p no:cacheprovider ${PYTEST_ARGUMENTS:-}" 30
record memcheck "$sanitize --tool memcheck $ours python3 validation/sanitizer_cases.py" 40
record racecheck "$sanitize --tool racecheck $ours python3 validation/sanitizer_cases.py --few" 40
record synccheck "$sanitize --tool synccheck --num-cuda-barriers 65536 $ours python3 validation/sanitizer_cases.py --few" 40
record initcheck "$sanitize --tool initcheck python3 validation/sanitizer_cases.py --few" 40
! wanted selftest || python3 -P -m fused_logp_hub doctor --selftest --json > "$prefix.selftest.json"
record doctor "python3 -P -m fused_logp_hub doctor" 60
record demo "python3 -P -m fused_logp_hub demo" 30
record example "python3 examples/score_qwen.py --batch 32" 12
record speed "python3 benchmarks/run.py --only shapes --shapes '4096x128256-bf16' --providers ours --out \$(mktemp -d)" 20
# By kernel: its time at the clocks as they are, DRAM and issue slots in use, instructions, hits in L1, and for each
# instruction issued the cycles that a warp waited for memory, a barrier, its turn, the arithmetic before, or parameters.
stall=smsp__average_warps_issue_stalled
metrics=gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed
metrics+=,smsp__issue_active.avg.pct_of_peak_sustained_active,smsp__inst_executed.sum,l1tex__t_sector_hit_rate.pct
for reason in long_scoreboard barrier not_selected wait imc_miss; do metrics+=,${stall}_${reason}_per_issue_active.ratio; done
record ncu "ncu --clock-control none --kernel-name regex:logp_ --metrics $metrics python3 validation/profile.py" 190
record memory "python3 -P validation/peak_memory.py" 10
record entropy "python3 -P validation/entropy_cost.py" 10
# Where there are two GPUs.
[[ $(nvidia-smi -L | wc -l) -lt 2 ]] || record two-gpus "python3 -P -m pytest --require-gpu -q -rs -p no:cacheprovider tests/test_distributed_nccl.py tests/test_gpu_runtime.py tests/test_gpu_failures.py -k 'nccl or g6 or visible or other_context'" 12
