#!/usr/bin/env bash
# Records a GPU run: bash validation/record.sh OUTPUT_PREFIX
# From a clean commit, with the wheel installed and the source folder out of the import path.
# Each file says what was run and ends with its summary.
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

record() {  # name, command, lines of its output to keep
  local file="$prefix.$1.txt"
  header "$2" > "$file"
  bash -c "$2" > "$file.log" 2>&1
  echo "exit status $?" >> "$file.log"
  tail -n "$3" "$file.log" >> "$file"
  tail -n 4 "$file"
  rm "$file.log"
}

sanitize="PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer"
record tests "python3 -P -m pytest --require-gpu -q -rs -p no:cacheprovider ${PYTEST_ARGUMENTS:-}" 30
record sanitizer "for tool in memcheck racecheck initcheck synccheck; do echo \$tool; $sanitize --tool \$tool python3 validation/sanitizer_cases.py; done" 40
record doctor "python3 -P -m fused_logp_hub doctor" 60
record demo "python3 -P -m fused_logp_hub demo" 30
record example "python3 examples/score_qwen.py --batch 32" 12
