"""The worker process of rewards.latex: reads requests, one per line, from stdin and writes messages to stdout.

    -> {"pairs": [[gold, answer], ...], "timeout_s": float}    LaTeX without boxes; one equal pair is enough
    <- {"parsed": bool}                                 whether the gold answer is an expression; if not, it is the last
    <- {"status": "correct" | "wrong" | "malformed"}    the status of the answer

The very first message is {"error": str | null}, after the import of math-verify.
Run as a script: python -P latex_worker.py MEMORY_MB
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

BOX = "\\boxed{"


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}`; "" if it is never closed, None if there is no box. Takes linear time."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    depth = 1
    for position in range(start + len(BOX), len(text)):
        character, before = text[position], text[position - 1]
        if before != "\\" and character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start + len(BOX) : position]
    return ""


def main() -> None:
    # What a library prints must not get between the messages.
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(**message: Any) -> None:
        messages.write(json.dumps(message) + "\n")
        messages.flush()

    try:
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        reply(error=str(error))
        return
    if sys.platform == "linux":
        # math-verify turns a MemoryError into "no expression" or "not equal".
        limit = int(sys.argv[1]) * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def expressions(latex: str) -> list[Any]:
        # Without its own time limit: the parent kills this process.
        no_limit: Any = None
        return parse(f"{BOX}{latex}}}", extraction, fallback_mode="no_fallback", parsing_timeout=no_limit)

    def judge(golds: list[list[Any]], answers: list[str]) -> str:
        status = "malformed"
        for gold, latex in zip(golds, answers, strict=True):
            answer = expressions(latex)
            if answer and gold and verify(gold, answer, timeout_seconds=None):
                return "correct"
            status = "wrong" if answer else status
        return status

    reply(error=None)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        # If the parent dies, the kernel ends this process: without a handler, nothing can delay that.
        signal.setitimer(signal.ITIMER_REAL, 2 * request["timeout_s"] + 10)
        golds = [expressions(gold) for gold, _ in request["pairs"]]
        reply(parsed=bool(golds[0]))
        if golds[0]:
            reply(status=judge(golds, [answer for _, answer in request["pairs"]]))
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
