"""Ways in which `tiny_programs` prints a result."""

from __future__ import annotations

from cookbook.data.generated.tiny_parts import by_type, operations

FORMATS = by_type(
    *operations(
        "int",
        "output",
        ("plain", "Print the result.", "Output it.", "print(n)", lambda n, _: n),
        ("angles", "Print it as <result>.", "Output it in <>.", 'print(f"<{{n}}>")', lambda n, _: f"<{n}>"),
        (
            "label",
            'Print "result:" and it.',
            'Output it after "result:".',
            'print("result:", n)',
            lambda n, _: f"result: {n}",
        ),
        (
            "above",
            "Print yes if it is above {k}, else no.",
            "Output yes if it is greater than {k}, otherwise no.",
            'print("yes" if n > {k} else "no")',
            lambda n, k: "yes" if n > k else "no",
        ),
        (
            "dash",
            "Print it, a dash and it plus {k}.",
            "Output it and the number {k} greater as x-y.",
            'print(f"{{n}}-{{n + {k}}}")',
            lambda n, k: f"{n}-{n + k}",
        ),
    ),
    *operations(
        "text",
        "output",
        ("plain", "Print the result.", "Output it.", "print(s)", lambda s, _: s),
        ("angles", "Print it as <result>.", "Output it in <>.", 'print(f"<{{s}}>")', lambda s, _: f"<{s}>"),
        (
            "label",
            'Print "result:" and it.',
            'Output it after "result:".',
            'print("result:", s)',
            lambda s, _: f"result: {s}",
        ),
        (
            "with_length",
            "Print it and its length.",
            "Output it, then its length.",
            "print(s, len(s))",
            lambda s, _: f"{s} {len(s)}",
        ),
    ),
    *operations(
        "ints",
        "output",
        ("plain", "Print the results.", "Output them.", "print(*xs)", lambda xs, _: " ".join(map(str, xs))),
        (
            "commas",
            "Print them with commas.",
            "Output them with commas between.",
            'print(*xs, sep=",")',
            lambda xs, _: ",".join(map(str, xs)),
        ),
    ),
    *operations(
        "words",
        "output",
        ("plain", "Print the results.", "Output them.", "print(*ws)", lambda ws, _: " ".join(ws)),
        (
            "commas",
            "Print them with commas.",
            "Output them with commas between.",
            'print(*ws, sep=",")',
            lambda ws, _: ",".join(ws),
        ),
    ),
)
"""By the type they print; the first of each type is the plain one."""
