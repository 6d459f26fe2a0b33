"""One end of a path as a program: answers its parent's JSON lines until the parent closes the stream.

python -m benchmarks.end_process MODULE SIDE OPTIONS, where SIDE is near (writes) or far (takes in)
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from typing import Any

from benchmarks.ends import Facts, Missing


async def _serve(end: Any, answers: int) -> None:
    """Answers one line after the other, then closes the end if it was opened."""
    loop, opened = asyncio.get_running_loop(), False
    try:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            asked = json.loads(line)
            answer: Facts
            try:
                answer = {"result": await getattr(end, asked["call"])(**asked["arguments"])}
                opened = True
            except Missing as error:
                answer = {"missing": str(error)}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            os.write(answers, (json.dumps(answer) + "\n").encode())
    finally:
        if opened:
            await end.close()


def main() -> None:
    """Runs one end. What libraries print goes to standard error, so that answers stay alone."""
    module, side, options = sys.argv[1:4]
    answers = os.dup(1)
    os.dup2(2, 1)
    kind = getattr(importlib.import_module(module), "NearEnd" if side == "near" else "FarEnd")
    asyncio.run(_serve(kind(**json.loads(options)), answers))


if __name__ == "__main__":
    main()
