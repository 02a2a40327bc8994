import pytest

from cookbook.sandbox.base import Language
from rewards.code_extract import extract_program

P = "print(1)\n"


def extracted(text: str, language: Language = "python") -> tuple[str, bool] | None:
    program = extract_program(text, language)
    return None if program is None else (program.text, program.fenced)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Here:\n```python\nprint(1)\n```\nDone.", (P, True)),
        ("~~~py\nprint(1)\n~~~", (P, True)),
        ("````Python3\nprint(1)\n````", (P, True)),
        ('```{.python title="a.py"}\nprint(1)\n```', (P, True)),
        ("```python\r\nprint(1)\r\n```\r\n", (P, True)),
        ("```\nprint(1)\n```", (P, False)),
        ("```python\nprint(1)\n", (P, False)),
        # The last of the language, whatever stands around it.
        ("```python\nprint(0)\n```\nBetter:\n```python\nprint(1)\n```", (P, True)),
        ("```python\nprint(1)\n```\nprints\n```\n1\n```", (P, True)),
        ("```python\nprint(1)\n```\nor\n```cpp\nint main() {}\n```", (P, True)),
        ("```text\n1\n```\n```\nprint(0)\n```\n```\nprint(1)\n```", (P, False)),
        ("```python\nprint(1)\n```\n```python\n\n```", (P, True)),
        # Lists, nesting, forgotten ends.
        ("1. So:\n   ```python\n   print(1)\n   ```\n", (P, True)),
        ("````markdown\n```python\nprint(1)\n```\n````", (P, True)),
        ("```python\nprint(0)\n```python\nprint(1)\n```", (P, True)),
        (
            '```python\n"""\n    ```python\n    x\n    ```\n"""\n```',
            ('"""\n    ```python\n    x\n    ```\n"""\n', True),
        ),
        ("```python\nx = '''\n~~~\n'''\n```", ("x = '''\n~~~\n'''\n", True)),
        ("```python\nx = '\u2028'\n```", ("x = '\u2028'\n", True)),
        # Thinking is no answer.
        ("<think>\n```python\nprint(0)\n```\n</think>\n```python\nprint(1)\n```", (P, True)),
        ("try\n```python\nprint(0)\n```\n</think>\nprint(1)", (P, False)),
        ("<think>\n```python\nprint(0)\n```\n</think>\nI do not know.", None),
        ("<think>\n```python\nprint(0)\n```\n", None),
        # No fences: the text itself, if it does something.
        ("print(1)", (P, False)),
        ("def f(x):\n    return x", ("def f(x):\n    return x\n", False)),
        ("The answer is print(1).", None),
        ("42", None),
        ("word", None),
        ("", None),
        ("```java\nclass A {}\n```\nprint(1)", None),
        ("(" * 100_000, None),
        ("x = 1\0", None),
    ],
)
def test_python(text, expected):
    assert extracted(text) == expected


@pytest.mark.parametrize(
    ("language", "tag", "bare"),
    [
        ("cpp", "C++", "#include <cstdio>\nint main() {}"),
        ("java", "java", "public class Main {}"),
        ("go", "golang", "package main\nfunc main() {}"),
        ("rust", "rs", "fn main() {}"),
        ("javascript", "js", "console.log(1)"),
    ],
)
def test_other_languages(language, tag, bare):
    assert extracted(f"```python\nprint(1)\n```\n```{tag}\nx\n```\n```python\nprint(1)\n```", language) == ("x\n", True)
    assert extracted(bare, language) == (bare + "\n", False)
    assert extracted("I cannot say.", language) is None
