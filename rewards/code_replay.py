"""The part of rewards.code that runs in the sandbox: one process calls functions, another uses the results.

`answer_calls` is the main function of the process that runs the program: it makes the requested calls and returns the
results as plain data. `judge_tests` is the main function of a process that runs the tests of the dataset, but not the
program: the program's functions are replaced by stand-ins that look up results. So nothing that the program does to
its own process (patching, exiting, printing, reading stack frames) can change a status or reach expected values.

A sandbox gets the text of this file: the first section and one of the others. It imports only the standard library, and
runs on Python 3.9 and later.

Plain data are None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict, nested at most
MAX_DEPTH deep, and built-in types (int, str ...). They are sent as JSON: a list is an array, and every kind that JSON
lacks is an object with one key, the name of the kind. Nothing is unpickled, so reading such data is safe.
"""

from __future__ import annotations

import ast
import builtins
import itertools
import json
import os
import random
import sys
import types

MAX_DEPTH = 100
MAX_ITEMS = 100_000
"""Largest number of items of an iterator that is plain data."""

MAX_CALLS = 10_000
"""How often tests may ask for a call that was not made yet before they must wait for the results."""


class NotPlain(TypeError):
    """A value that is not plain data. The message names its type."""


class Opaque:
    """Stands for a result that is not plain data; equal only to itself."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


def encode(value: object, depth: int = 0) -> object:
    """Convert plain data to JSON. A subclass (Counter, namedtuple) becomes its base, an iterator its items.

    Raises:
        NotPlain: the value, or one inside it, has another type or is nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise NotPlain("data nested too deeply")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, depth + 1) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]}
    if isinstance(value, (set, frozenset)):
        # Sorted, so that the same set is the same text in every process.
        items = sorted((encode(item, depth + 1) for item in value), key=json.dumps)
        return {"set" if isinstance(value, set) else "frozenset": items}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": value.hex()}
    if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
        return {"type": value.__name__}
    if isinstance(value, (types.GeneratorType, map, filter, zip, reversed, enumerate)):
        items = list(itertools.islice(value, MAX_ITEMS + 1))
        if len(items) <= MAX_ITEMS:
            return {"iterator": [encode(item, depth + 1) for item in items]}
    raise NotPlain(type(value).__name__)


def decode(data: object) -> object:
    """The inverse of `encode`.

    Raises:
        DECODE_ERRORS: `data` was not made by `encode`.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "type" and isinstance(getattr(builtins, content), type):
        return getattr(builtins, content)
    if kind == "object":
        return Opaque(content)
    if kind == "dict":
        return {decode(key): decode(item) for key, item in content}
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "iterator": iter}[kind](
        [decode(item) for item in content]
    )


DECODE_ERRORS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What reading an answer may raise if the program has written it instead of the harness."""


def call_request(function: str, args: tuple[object, ...], kwargs: dict[str, object]) -> str:
    """A call as one line of text, the same for equal calls. Raises NotPlain."""
    return json.dumps(
        [function, [encode(arg) for arg in args], [[key, encode(value)] for key, value in kwargs.items()]]
    )


def write_line(channel: int, line: str) -> None:
    data = (line + "\n").encode()
    while data:
        data = data[os.write(channel, data) :]


# --- In the program's process


def answer_calls() -> None:
    """Read {"prelude", "program", "requests"} from stdin, run the program, and write one line for it and each request.

    The first line is loaded, compile_error or runtime_error; the others are {"value": data} or
    {"raised": type, "message": text}. What the program prints goes to stderr. It runs as the module `program`, not
    `__main__`.
    """
    channel = os.dup(1)
    os.dup2(2, 1)
    leave = os._exit  # saved before the program can change it
    job = json.load(sys.stdin)
    module = types.ModuleType("program")
    sys.modules["program"] = module
    state = "loaded"
    for source in (job["prelude"], job["program"]):
        state = state if state != "loaded" else _load(source, module)
    write_line(channel, state)
    if state == "loaded":
        for request in job["requests"]:
            write_line(channel, _answer(module, request))
    leave(0)


def _load(source: str, module: types.ModuleType) -> str:
    try:
        code = compile(source, "program.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        print(type(error).__name__ + ":", error, file=sys.stderr, flush=True)
        return "compile_error"
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        print(type(error).__name__ + ":", error, file=sys.stderr, flush=True)
        return "runtime_error"
    return "loaded"


def _answer(module: types.ModuleType, request: str) -> str:
    name, args, kwargs = json.loads(request)
    try:
        function = (
            getattr(module.Solution(), name)
            if name not in vars(module) and "Solution" in vars(module)
            else getattr(module, name)
        )
        result = function(*[decode(arg) for arg in args], **{key: decode(value) for key, value in kwargs})
        try:
            return json.dumps({"value": encode(result)})
        except NotPlain as error:
            return json.dumps({"value": {"object": str(error)}})
    except BaseException as error:
        return json.dumps({"raised": type(error).__name__, "message": str(error)[:200]})


# --- In the tests' process


class Missing(BaseException):
    """A test needs the result of a call that was not made yet."""


class Died(BaseException):
    """A test needs the result of a call during which the program was killed."""


class Replay:
    """Stand-ins for the program's functions.

    `results` maps each request to {"answer": a line of `answer_calls`} or {"died": a status}.
    """

    def __init__(self, functions: list[str], results: dict[str, dict[str, str]], channel: int) -> None:
        self.functions = functions
        self.results = results
        self.channel = channel
        self.missing: dict[str, None] = {}
        self.misses = 0
        self.unfit = ""
        """The type of an argument that is not plain data, or ""."""
        self.died = ""
        self.raised: BaseException | None = None
        """The last exception that the program raised."""

    def install(self, namespace: dict[str, object]) -> None:
        for name in self.functions:
            namespace[name] = self.stand_in(name)

    def stand_in(self, name: str) -> types.FunctionType:
        def function(*args: object, **kwargs: object) -> object:
            try:
                request = call_request(name, args, kwargs)
            except NotPlain as error:
                self.unfit = str(error)
                raise
            if request not in self.results:
                self.missing[request] = None
                self.misses += 1
                if self.misses == MAX_CALLS:
                    self.finish()  # the test may be in a loop that waits for a result
                raise Missing
            return self.replay(self.results[request])

        function.__name__ = function.__qualname__ = name
        return function

    def finish(self) -> None:
        """Write the calls that must be made first, and end this process."""
        write_line(self.channel, json.dumps({"missing": list(self.missing)}))
        os._exit(0)

    def replay(self, result: dict[str, str]) -> object:
        if "died" in result:
            self.died = result["died"]
            raise Died
        try:
            answer = json.loads(result["answer"])
            if "value" in answer:
                return decode(answer["value"])
            name, message = str(answer["raised"]), str(answer["message"])
        except DECODE_ERRORS:  # written by the program itself
            name, message = "RuntimeError", "no result"
        # A StopIteration would end a loop of the test normally: `all(map(f, values))`.
        kind = None if name == "StopIteration" else getattr(builtins, name, None)
        try:
            self.raised = (
                kind(message) if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError(name, message)
            )
        except TypeError:  # needs more than a message
            self.raised = RuntimeError(name, message)
        raise self.raised


class _CarryOn(ast.NodeTransformer):
    """Makes tests continue after a statement that fails, to find the calls that follow."""

    def guard(self, node: ast.stmt) -> ast.Try:
        handler = ast.ExceptHandler(type=None, name=None, body=[ast.Pass()])
        return ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[])

    visit_Assert = visit_Assign = visit_AugAssign = visit_Expr = guard


def judge_tests() -> None:
    """Read {"setup", "tests", "functions", "results", "stop_at_first_failure"} from stdin; write a line for each test.

    The lines are {"verdict": status} for one test after another, then one of {"end": null}, {"missing": requests} if
    further calls must be answered first (the verdicts are not valid then), or {"broken": reason}.
    """
    channel = os.dup(1)
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    replay = Replay(job["functions"], job["results"], channel)
    line = _judge(job, replay, channel)
    if replay.missing:
        _collect(job, replay)
    if replay.unfit and not job["results"]:
        line = {"broken": "a function of the program is called with data that cannot be sent to it: " + replay.unfit}
    elif replay.missing:
        replay.finish()
    write_line(channel, json.dumps(line))


def _judge(job: dict, replay: Replay, channel: int) -> dict[str, object]:
    try:
        codes = [compile(test, "<test>", "exec", dont_inherit=True) for test in job["tests"]]
        namespace = _namespace(compile(job["setup"], "<setup>", "exec", dont_inherit=True), replay)
    except Missing:
        return {}
    except BaseException as error:
        if not job["results"]:
            return {"broken": type(error).__name__ + ": " + str(error)}
        write_line(channel, json.dumps({"verdict": _blame(error, replay)}))
        return {"end": None}
    for code in codes:
        replay.died, replay.raised = "", None
        verdict = "passed"
        random.seed(0)
        try:
            exec(code, namespace)
        except BaseException as error:
            verdict = _blame(error, replay)
        if replay.missing:
            break
        verdict = replay.died or verdict
        write_line(channel, json.dumps({"verdict": verdict}))
        if verdict != "passed" and job["stop_at_first_failure"]:
            break
    return {"end": None}


def _blame(error: BaseException, replay: Replay) -> str:
    return replay.died or ("runtime_error" if error is replay.raised else "wrong")


def _namespace(setup: types.CodeType, replay: Replay) -> dict[str, object]:
    namespace: dict[str, object] = {"__name__": "tests"}
    replay.install(namespace)
    random.seed(0)
    exec(setup, namespace)
    # Again, since a setup may define them too: HumanEval's prompts end with the head of the function.
    replay.install(namespace)
    return namespace


def _collect(job: dict, replay: Replay) -> None:
    """Run the tests again and continue after every statement that fails, to find the calls that they make."""

    def variant(source: str) -> types.CodeType:
        tree = ast.fix_missing_locations(_CarryOn().visit(ast.parse(source)))
        return compile(tree, "<test>", "exec", dont_inherit=True)

    try:
        namespace = _namespace(variant(job["setup"]), replay)
    except BaseException:
        return
    for test in job["tests"]:
        random.seed(0)
        try:
            exec(variant(test), namespace)
        except BaseException:
            continue
