"""A process that tokenises parts: reads part numbers, answers with a line of JSON each.

It is started as a program of its own (python -m dsjax.data.worker JOB), so that it shares nothing
with a caller that may already run threads, and ends when its caller is gone.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from dsjax.data.store import Job, write_part
from dsjax.data.tokenizer import from_spec
from dsjax.errors import InputError


def main(job_file: str) -> None:
    """Works until standard input ends; a fault of the data is the answer {"faults": [...]}."""
    # Ctrl-C reaches every process of a terminal; the caller decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    job = Job.parse(Path(job_file).read_text())
    tokenizer = from_spec(job.tokenizer)
    for line in sys.stdin:
        try:
            write_part(job, int(line), tokenizer)
            answer: dict[str, list[str]] = {}
        except InputError as error:
            answer = {"faults": error.faults}
        except OSError as error:
            answer = {"faults": [f"{error.filename or job.directory}: {error.strerror or error}"]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
