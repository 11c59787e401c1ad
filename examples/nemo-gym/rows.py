"""Writes the tasks of `rolltap run` as rows of NeMo Gym: python rows.py TASKS HARNESS [ARGV...] > rows.jsonl"""

import json
import sys
from pathlib import Path

from rolltap.harnesses.runner.specs import Defaults, resolve_paths
from rolltap.harnesses.runner.tasks import read_tasks

path, harness, argv = Path(sys.argv[1]).resolve(), sys.argv[2], tuple(sys.argv[3:])
defaults = Defaults(base=path.parent, harness=harness, argv=argv)
for task in read_tasks(path):
    line = {"id": task.id, "instruction": task.instruction, **resolve_paths(task, defaults).spec}
    asked = {"input": [{"role": "user", "content": task.instruction}]}
    print(json.dumps({"responses_create_params": asked, "rolltap_task": line}))
