import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

SCRIPT = """
import importlib, pathlib, sys
sys.modules["torch"] = None
names = ["engine.plan", "engine.sequence"]
for folder in ("engine/scheduling", "engine/kv"):
    for path in sorted(pathlib.Path(folder).glob("*.py")):
        names.append(".".join(path.with_suffix("").parts))
for name in names:
    importlib.import_module(name)
assert len(names) >= 9, names

from engine.kv.block_manager import BlockManager
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.scheduler import Scheduler
from engine.sequence import Request
from engine.plan import StepTokens
from streamkv.sampling import SamplingParams

scheduler = Scheduler(SchedulerLimits(4, 16, 0, 4, True, 64, 10, (2,)), BlockManager(8, 4), lambda: 0.0)
scheduler.add(Request(0, b"", b"", [5, 6, 7], SamplingParams(seed=0, max_tokens=2), 0.0))
while plan := scheduler.plan():
    outputs = scheduler.update(plan, StepTokens([9]))
assert outputs[0].finish_reason == "length", outputs
print("ran")
"""


def test_scheduler_and_block_manager_run_where_torch_is_blocked():
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ran\n", done.stderr
