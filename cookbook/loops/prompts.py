"""The problems of policy training: the rows that leave room for a completion and that the reward can judge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cookbook.core.errors import DataError
from cookbook.core.examples import Example
from cookbook.core.judging import check_gold
from cookbook.core.rollouts import Reward
from cookbook.data.bad_rows import BadRow
from cookbook.data.curriculum import Curriculum
from cookbook.data.kinds import PromptDataset
from cookbook.envs.base import EnvFactory
from cookbook.loops.rows import RowCheck, is_checked_at_once
from cookbook.loops.run import Run


class Prompts:
    """The examples that a run can use.

    A prompt must leave room for `max_tokens` tokens in the model's context; the chat format must be able to write it,
    and the reward to read its gold answer. Other rows are left out when the run opens or, of a large split, when they
    are drawn.

    Raises:
        DataError: no row of a split is left, or one is bad and `dataset.on_bad_row` is "fail".
    """

    def __init__(self, run: Run, dataset: PromptDataset, make_env: EnvFactory, reward: Reward) -> None:
        loop, settings = run.config.loop, run.config.eval
        self._make_env, self._reward = make_env, reward
        self._context_length = run.policy.context_length
        self._max_tokens = {"train": loop.max_tokens, "test": settings.max_tokens or loop.max_tokens}
        self._check = RowCheck[Example](dataset, self._problem, Path(run.config.run_dir))
        self._checked_at_once = is_checked_at_once(dataset.train)
        self.train: Sequence[Example] = dataset.train
        if self._checked_at_once:
            self.train = self._check.first("train", dataset.train, len(dataset.train))
        self.test: list[Example] = self._check.first("test", dataset.test, settings.examples)
        used = {"train": len(self.train) if self._checked_at_once else None, "test": len(self.test)}
        run.report_rows(self._check, used, dataset)

    def draw(self, curriculum: Curriculum, count: int) -> list[int]:
        """The indices of the next examples; one that cannot be used is left out, and the curriculum chooses another.

        Raises:
            DataError: as many as the split has cannot be used.
        """
        if self._checked_at_once:
            return curriculum.choose(count)
        drawn: list[int] = []
        refused = 0
        while len(drawn) < count:
            for index in curriculum.choose(count - len(drawn)):
                if self._check.is_usable("train", self.train[index]):
                    drawn.append(index)
                else:
                    refused += 1
            if refused >= len(self.train):
                raise self._check.nothing_left("train")
        self._check.write()
        return drawn

    def _problem(self, split: str, example: Example) -> None:
        """Raises BadRow for an example that cannot be used."""
        try:
            observation = self._make_env(example).initial_observation()
        except DataError as error:
            raise BadRow("the chat format cannot write it", str(error)) from error
        length, max_tokens = len(observation.prompt_tokens), self._max_tokens[split]
        if self._context_length is not None and length + max_tokens > self._context_length:
            raise BadRow(
                "prompt too long",
                f"{length} tokens, and {max_tokens} for the completion, exceed the model's context of "
                f"{self._context_length}; lower loop.max_tokens to keep it"
                if length < self._context_length
                else f"{length} tokens, and the model's context is {self._context_length}",
            )
        try:
            check_gold(self._reward, example)
        except DataError as error:
            raise BadRow("the reward cannot judge it", str(error)) from error
