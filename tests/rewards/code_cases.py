"""Problems and calls that the tests of the code reward share."""

import asyncio

from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from cookbook.sandbox.base import Sandbox
from cookbook.sandbox.problem import AssertTests, CallTests, CodeProblem, StdinTests
from rewards.code import CodeReward

SECRET = "zebra-7781"
"""What the right answer is in all three kinds of tests. Hostile programs know its form, not its number."""

PROBLEMS = {
    "stdin": CodeProblem(StdinTests((("3\n", SECRET + "\n"),))),
    "call": CodeProblem(CallTests("f", (((3,), SECRET),))),
    "assert": CodeProblem(AssertTests((f"assert f(3) == '{SECRET}'",), ("f",))),
}


def example(problem: CodeProblem, **extra: object) -> Example:
    # A name for every problem: verdicts are remembered by it.
    return Example(f"x/{hash(repr(problem))}", (), "", {"problem": problem, **extra})


def score(reward: CodeReward, program: str, problem: CodeProblem) -> RewardResult:
    return asyncio.run(reward(Completion(f"```python\n{program}\n```", "eos", 1), example(problem)))


def judged(sandbox: Sandbox, program: str, problem: CodeProblem, **settings) -> RewardResult:
    return score(
        CodeReward(sandbox=sandbox, **{"time_limit_s": 1.0, "wall_factor": 30.0, **settings}), program, problem
    )
