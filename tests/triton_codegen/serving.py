"""Workers that import what they need once, and answer each request in a child of their own.

A request is a line of JSON: mode, number of random graphs, names of cases.  The answer is the last
line that the child writes, then ``END``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

END = "-- end of an answer --"
Run = Callable[[str, int, list[str]], None]


def serve(run: Run) -> None:
    """In a worker: runs each request of the standard input in a fork."""
    for line in sys.stdin:
        sys.stdout.flush()
        child = os.fork()
        if not child:
            status = 1
            try:
                run(*json.loads(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps(f"the child ended with status {status}"))
        print(END, flush=True)


class Server:
    """A worker that is started by the first request, and ended by :meth:`close`."""

    def __init__(self, script: Path) -> None:
        self.script = script
        self.process: subprocess.Popen[str] | None = None

    def ask(self, mode: str, random_graphs: int, names: list[str]) -> dict[str, str]:
        if self.process is None:
            self.process = subprocess.Popen(
                [sys.executable, str(self.script), "serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps([mode, random_graphs, names]), file=self.process.stdin, flush=True)
        lines: list[str] = []
        for line in self.process.stdout:
            if line.strip() == END:
                break
            lines.append(line)
        else:
            raise AssertionError(f"the worker ended: {self.process.wait()}")
        found = json.loads(lines[-1])
        assert isinstance(found, dict), found
        return found

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()  # the end of its input is the end of it
            self.process = None
