"""What `--help` and `cookbook help` print: recipes, groups and their options, the user's own among them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cookbook.cli import flags, folders
from cookbook.cli import main as commands
from cookbook.cli.options import BASE_SIZE, groups, option_file, options, recipes, size_name, sizes, summary_line
from cookbook.core.errors import ConfigError, CookbookError
from cookbook.core.suggest import did_you_mean

EXAMPLES = """\
Examples
  cookbook run recipe=gsm8k_grpo
  cookbook run recipe=gsm8k_grpo/gpu backend=tinker
  cookbook run recipe=gsm8k_grpo model=smollm2 dataset=gsm8k loop.max_tokens=256
  cookbook run -m recipe=gsm8k_grpo optim.learning_rate=3e-4,1e-3 seed=0,1
"""

SETTINGS = """\
Settings (key=value; all of them: --cfg job)
  seed=0  run_dir=DIR  resume=never|auto|DIR  debug=true
  model.path=DIR  dataset.path=DIR
  loop.steps  loop.groups_per_batch  loop.group_size  loop.max_tokens  loop.temperature  loop.num_substeps
  loop.kl_penalty_coef  loop.batch_size  loop.epochs
  optim.learning_rate  lora.rank  lora.alpha
  eval.every  eval.examples  checkpoint.every  checkpoint.keep  budget.max_usd  budget.max_tokens
"""

FLAGS = """\
Flags
  -m                 run once for each combination of values separated by commas; repeated, it skips finished jobs
  --cfg job          print the configuration and stop
  --config-dir DIR   options of your own (docs/your_own.md); ./conf is found without it
  --debug            show the traceback of an error as well (the same as debug=true)
  --version
  --hydra-help       what Hydra itself can do; also: --resolve, --package, --info, --shell-completion
"""


def usage() -> str:
    """The groups and their options, the recipes and their sizes, the most useful settings and flags, and examples."""
    lines = ["usage: cookbook run recipe=NAME [group=option ...] [key=value ...]", "", EXAMPLES]
    lines.append(f"Recipes (recipe=NAME; NAME is the {BASE_SIZE} size, NAME/SIZE another one)")
    for recipe in recipes():
        others = [size_name(name) for name in sizes(recipe) if name != recipe]
        listed = f" (also {', '.join(f'{recipe}/{size}' for size in others)})" if others else ""
        lines.append(f"  {recipe}: {summary_line('recipe', recipe)}{listed}")
    lines += ["", "Groups (group=option)"]
    for group, names in groups().items():
        if group not in ("recipe", "sweep"):
            lines.append(f"  {group:<10} {', '.join(names)}")
    lines += ["", "Sweeps (+sweep=NAME)"]
    lines += [f"  {sweep}: {summary_line('sweep', sweep)}" for sweep in options("sweep")]
    if folders.own():
        lines += ["", f"Your own options are in {', '.join(map(str, folders.own()))}"]
    return "\n".join([*lines, "", SETTINGS, FLAGS]).rstrip() + "\n"


def main(arguments: Sequence[str]) -> int:
    """`cookbook help [NAME]`: print everything, or what NAME is. Exit status 2 where there is nothing of that name."""
    try:
        command = flags.parse(arguments)
        folders.use(command.config_dirs)
        for text in [_about(name) for name in command.overrides] or [f"{commands.usage()}\n\n{usage()}"]:
            print(text.rstrip())
    except CookbookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _about(name: str) -> str:
    if name == "run":
        return usage()
    if name == "help":
        return commands.COMMANDS["help"].summary
    if name in commands.COMMANDS:
        with suppress(SystemExit):
            importlib.import_module(commands.COMMANDS[name].module).main(["--help"])
        return ""
    if name in groups():
        return "\n".join([f"{name}=OPTION"] + [f"  {option}: {summary_line(name, option)}" for option in options(name)])
    if name in options("recipe"):
        return _about_recipe(name)
    known = [*commands.COMMANDS, *groups(), *options("recipe")]
    raise ConfigError(f"{name}: there is no such command, group or recipe{did_you_mean(name, known)}")


def _about_recipe(name: str) -> str:
    file = option_file("recipe", name)
    lines = [f"cookbook run recipe={name}", f"  {summary_line('recipe', name)}", f"  {file}"]
    readme = Path(folders.PACKAGE.parent, "recipes", name.split("/")[0], "README.md")
    lines += [f"  {readme}"] if readme.is_file() else []
    others = [other for other in sizes(name) if other != name]
    lines += ["Other sizes"] if others else []
    lines += [f"  recipe={other} ({size_name(other)}): {summary_line('recipe', other)}" for other in others]
    return "\n".join([*lines, "All of its settings", f"  cookbook run recipe={name} --cfg job"])
