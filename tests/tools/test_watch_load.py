"""tools/watch_load.py: a batch with pages open and without."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_batch_runs_with_pages_and_without():
    command = [sys.executable, str(ROOT / "tools" / "watch_load.py"), "--tiny", "--rows", "6", "--tokens", "8"]
    process = subprocess.run(
        [*command, "--pages", "3", "--turns", "1", "--most-loss", "1"], capture_output=True, text=True, timeout=120
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout)
    assert found["passed"] and found["tokens_per_second"] > 0 and len(found["turns"]["with"]) == 1
