"""Renderer from chat messages to tokens and back, based on the `renderers` library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, cast

from cookbook.core.errors import ConfigError, DataError
from cookbook.core.examples import Message
from cookbook.core.turns import end_of_turn_tokens

if TYPE_CHECKING:
    from renderers import RendererConfig
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["last_assistant", "all_assistant", "everything"]

_EMPTY_THINKING = re.compile(r"\s*<think>\s*</think>\n*")


class Renderer:
    """One model's chat format.

    Args:
        tokenizer: the model's tokenizer.
        name: a renderer of the `renderers` library ("qwen3", "llama-3", "gpt-oss", ...), "default" for the tokenizer's
            own chat template, or "auto": the renderer that the library names for `model_name`, else "default".
        model_name: the base model's name, for "auto".

    Raises:
        ConfigError: no such renderer, or the tokenizer has no chat template to render with.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str = "auto", model_name: str = "") -> None:
        # Imported here: it takes a second, which `cookbook help` must not wait for.
        from renderers import DefaultRendererConfig, config_from_name, create_renderer
        from renderers.base import MODEL_RENDERER_MAP

        if name == "auto":
            name = MODEL_RENDERER_MAP.get(model_name, "default")
        if name == "default" and not tokenizer.chat_template:
            raise ConfigError(
                f"model.renderer=auto: the tokenizer of {model_name or tokenizer.name_or_path} has no chat template; "
                "name one of the renderers library's formats, for example model.renderer=qwen3"
            )
        try:
            # The explicit default config keeps the library from probing the hub for names that it does not know.
            config = DefaultRendererConfig() if name == "default" else cast("RendererConfig", config_from_name(name))
            self._renderer = create_renderer(tokenizer, config)
        except (
            ValueError,
            RuntimeError,
            AssertionError,
        ) as error:  # the last two: no vocabulary file, a special token is missing
            raise ConfigError(f"model.renderer={name}: {error}") from error
        self._tokenizer = tokenizer
        # Lengths are checked row by row, where the row can be named.
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        template = f"chat template of {model_name or tokenizer.name_or_path or 'the tokenizer'}"
        self._by_template = name == "default"
        self._format = template if self._by_template else f"renderer {name!r}"
        own = [] if self._by_template else self._renderer.get_stop_token_ids()
        self.stop_tokens: tuple[int, ...] = tuple(dict.fromkeys((*own, *end_of_turn_tokens(tokenizer))))
        """Ids of the tokens that end an assistant's turn. The first one is what the format writes after an answer."""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the assistant's next turn begins.

        Raises:
            DataError: the format refuses the conversation.
        """
        from jinja2 import TemplateError

        try:
            return self._renderer.render_ids(_plain(messages), add_generation_prompt=True)
        except (ValueError, TypeError, TemplateError) as error:
            raise DataError(f"{self._format} refuses the conversation: {error}") from error

    def continuation(
        self, prompt_tokens: Sequence[int], completion_tokens: Sequence[int], messages: Sequence[Message]
    ) -> list[int] | None:
        """The prompt of the next turn with the sampled tokens unchanged, or None if the format cannot continue them."""
        bridged = self._renderer.bridge_to_next_turn(list(prompt_tokens), list(completion_tokens), _plain(messages))
        return None if bridged is None else list(bridged.token_ids)

    def supervised(
        self, messages: Sequence[Message], train_on: TrainOn, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], list[bool]]:
        """The tokens of a whole conversation, and its loss mask of the same length: true where a token is trained on.
        An assistant's message of weight 0 is not.

        Of an assistant turn the mask has exactly the model's own part: the content (reasoning and tool calls as the
        format writes them) and the token that ends the turn. It leaves out what the format adds by itself: the turn's
        opening, an empty thinking block, white space after the end of turn.

        The last turn is written as the model would write it. Earlier turns are written as the format writes history:
        some formats leave out their reasoning, and gpt-oss ends them with `<|end|>`, which does not stop sampling,
        instead of `<|return|>`. For such formats "last_assistant" is the safer choice.

        Args:
            messages: a conversation that ends with an assistant turn.
            train_on: "last_assistant" (the last message alone), "all_assistant", or "everything" (all tokens but the
                first, which nothing predicts).
            tools: specifications of the functions that the assistant may call, in the OpenAI format.

        Raises:
            DataError: the conversation does not end with an assistant turn, or the format refuses it or does not write
                its tool calls or the reasoning of a turn that is trained on. `writes_tools` tells about `tools`.
            ConfigError: the format does not show which tokens are the assistant's: a chat template without an end of
                turn, or one that rewrites earlier turns.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise DataError(
                "the conversation does not end with an assistant turn: there is nothing to train on at its end"
            )
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        if train_on != "all_assistant":
            turns = turns[-1:]
        turns = [turn for turn in turns if messages[turn].get("weight") != 0]
        specs = [dict(tool) for tool in tools] if tools else None
        self._check_all_is_written(messages, turns, specs)
        render = self._supervised_by_template if self._by_template else self._supervised_by_renderer
        tokens, loss_mask = render(messages, turns, specs)
        if train_on != "everything":
            return tokens, loss_mask
        context = [index for index, message in enumerate(messages) if message.get("weight") == 0]
        if not context:
            return tokens, [index > 0 for index in range(len(tokens))]
        tokens, left_out = render(messages, context, specs)
        return tokens, [index > 0 and not out for index, out in enumerate(left_out)]

    def writes_tools(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the specifications of tools are in the text of a conversation.

        Raises:
            DataError: the format refuses the conversation.
        """
        return self._written(messages, [dict(tool) for tool in tools]) != self._written(messages, None)

    def _written(self, messages: Sequence[Message], tools: list[Any] | None) -> object:
        """What the format makes of a conversation, to compare."""
        by_template = self._by_template
        return self._template_text(messages, tools) if by_template else self._rendered(messages, tools).token_ids

    def _check_all_is_written(self, messages: Sequence[Message], turns: Sequence[int], tools: list[Any] | None) -> None:
        """Raises DataError unless the format writes the tool calls and the reasoning of the given turns."""
        thinking = [turn for turn in turns if messages[turn].get("reasoning_content")]
        calling = any("tool_calls" in message for message in messages)
        if not (thinking or calling):
            return
        whole = self._written(messages, tools)
        if calling and self._written(_with_other_calls(messages), tools) == whole:
            raise DataError(
                f"the {self._format} does not write tool calls: remove such conversations, or use another model"
            )
        for turn in thinking:
            others = [*messages]
            others[turn] = {**messages[turn], "reasoning_content": f"{messages[turn].get('reasoning_content')}."}
            if self._written(others, tools) == whole:
                raise DataError(
                    f"the {self._format} does not write the reasoning of message {turn}: remove reasoning_content, use "
                    "loop.train_on=last_assistant, or use another model"
                )

    def _rendered(self, messages: Sequence[Message], tools: list[Any] | None) -> Any:
        try:
            return self._renderer.render(_plain(messages), tools=tools)
        except (ValueError, TypeError) as error:
            raise DataError(f"{self._format} refuses the conversation: {error}") from error

    def _supervised_by_renderer(
        self, messages: Sequence[Message], turns: Sequence[int], tools: list[Any] | None
    ) -> tuple[list[int], list[bool]]:
        """For the library's own formats, which say of each token whose it is and whether a model would sample it."""
        rendered = self._rendered(messages, tools)
        tokens = list(rendered.token_ids)
        if len(rendered.sampled_mask) != len(tokens):
            raise ConfigError(
                f"{self._format} does not say which tokens are the assistant's; try model.renderer=default"
            )
        loss_mask = [False] * len(tokens)
        for turn in turns:
            own = [position for position, owner in enumerate(rendered.message_indices) if owner == turn]
            sampled = [position for position in own if rendered.sampled_mask[position]]
            if not sampled:
                raise DataError(f"{self._format} writes nothing for the assistant turn {turn}")
            start, end = sampled[0], sampled[-1] + 1
            if messages[turn].get("tool_calls"):
                # gpt-oss names the function in the turn's header: it is the model's from where it leaves the generation
                # prompt.
                history = _plain(messages[:turn])
                opening = self._renderer.render_ids(history, tools=tools, add_generation_prompt=True)
                opening = opening[len(self._renderer.render_ids(history, tools=tools)) :]
                start = own[0] + _common_prefix(tokens[own[0] : end], opening)
            if turn == len(messages) - 1 and tokens[end - 1] not in self.stop_tokens:
                # GLM ends a turn by opening the next one, which the last turn has not.
                tokens.append(self.stop_tokens[0])
                loss_mask.append(True)
            loss_mask[start:end] = [True] * (end - start)
            lead = _added_lead(self._decode(tokens[start : end - 1]), messages[turn])
            while lead and len(self._decode(tokens[start : start + 1])) <= lead:
                lead -= len(self._decode(tokens[start : start + 1]))
                loss_mask[start] = False
                start += 1
        return tokens, loss_mask

    def _supervised_by_template(
        self, messages: Sequence[Message], turns: Sequence[int], tools: list[Any] | None
    ) -> tuple[list[int], list[bool]]:
        """For a chat template: a turn is the text between its generation prompt and its end of turn.

        The text is cut there and tokenized in pieces, as it is when a model samples: no token reaches from the prompt
        into the turn.
        """
        whole = self._template_text(messages, tools)
        tokens: list[int] = []
        loss_mask: list[bool] = []
        done = 0
        for turn in turns:
            start, end = self._turn_in_text(whole, messages, turn, tools)
            for piece, own in ((whole[done:start], False), (whole[start:end], True)):
                piece_tokens = self.tokens(piece)
                tokens += piece_tokens
                loss_mask += [own] * len(piece_tokens)
            done = end
        rest = self.tokens(whole[done:])
        return tokens + rest, loss_mask + [False] * len(rest)

    def _turn_in_text(
        self, whole: str, messages: Sequence[Message], turn: int, tools: list[Any] | None
    ) -> tuple[int, int]:
        """Where in the text of the whole conversation an assistant turn's own part begins and ends."""
        before = self._template_text(messages[:turn], tools, add_generation_prompt=True)
        through = self._template_text(messages[: turn + 1], tools)
        if not through.startswith(before) or not whole.startswith(through):
            raise ConfigError(
                f"the {self._format} is not prefix-stable: message {turn} reads differently in the whole conversation "
                "than when the assistant writes it; use train_on=last_assistant, or set model.renderer to a format of "
                "the renderers library"
            )
        message = messages[turn]
        written = through[len(before) :]
        body_end, end = self._end_of_turn(written)
        if body_end == end:
            raise ConfigError(
                f"the {self._format} ends no assistant turn with a special token, so a model could not learn to stop"
            )
        return len(before) + _added_lead(written[:body_end], message), len(before) + end

    def _end_of_turn(self, written: str) -> tuple[int, int]:
        """Where in a turn's text its end-of-turn token begins and ends: the first one, where several close the turn,
        since sampling stops there. What follows it is not the model's. An empty range: there is none."""
        endings = [self._decode([token]) for token in self.stop_tokens]
        begin = end = unread = len(written.rstrip())
        while ending := max((each for each in endings if written.endswith(each, 0, unread)), key=len, default=""):
            begin, end = unread - len(ending), unread
            unread = len(written[:begin].rstrip())
        return begin, end

    def _template_text(
        self, messages: Sequence[Message], tools: list[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [_with_decoded_arguments(message) for message in messages],
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except TemplateError as error:
            raise DataError(f"the {self._format} refuses the conversation: {error}") from error
        assert isinstance(text, str)
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        decoded = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        assert isinstance(decoded, str)
        return decoded

    def tokens(self, text: str) -> list[int]:
        """The tokens of plain text, with nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def text(self, completion_tokens: Sequence[int]) -> str:
        """The text of a completion, without the token of `stop_tokens` that ended it."""
        tokens = list(completion_tokens)
        if tokens and tokens[-1] in self.stop_tokens:
            tokens.pop()
        return self._decode(tokens)


def _plain(messages: Sequence[Message]) -> list[Any]:
    """As the formats take them: without the weight, which is no part of the text."""
    return [{key: value for key, value in message.items() if key != "weight"} for message in messages]


def _with_decoded_arguments(message: Message) -> dict[str, Any]:
    """Templates expect the arguments of tool calls as objects; the OpenAI format has them as JSON text."""
    (plain,) = _plain([message])
    if "tool_calls" in message:
        plain["tool_calls"] = [{**call, "function": _decoded(call["function"])} for call in message["tool_calls"]]
    return plain


def _with_other_calls(messages: Sequence[Message]) -> list[Message]:
    """The same conversation with every tool call naming another function."""
    changed: list[Message] = []
    for message in messages:
        calls = [
            {**call, "function": {**call["function"], "name": call["function"]["name"] + "_"}}
            for call in message.get("tool_calls", [])
        ]
        changed.append({**message, "tool_calls": calls} if calls else message)
    return changed


def _decoded(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # text that is not JSON stays as it is: templates write it verbatim
            arguments = json.loads(arguments)
    return {**function, "arguments": arguments}


def _added_lead(text: str, message: Message) -> int:
    """Length of what the format added before the message: an empty thinking block, a channel's name."""
    if "<think>" in message["content"] or message.get("reasoning_content"):
        return 0
    if message.get("tool_calls"):
        empty = _EMPTY_THINKING.match(text)
        return empty.end() if empty else 0
    content = message["content"]
    if text.endswith(content):
        lead = len(text) - len(content)
    elif text.rstrip().endswith(content.strip()):  # the format trims
        lead = len(text.rstrip()) - len(content.strip())
    else:
        return 0
    # White space alone is a way of writing the content's first token (" yes" for "yes"), so it stays.
    return lead if text[:lead].strip() else 0


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
