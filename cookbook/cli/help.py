"""What `--help` prints."""

from __future__ import annotations

from cookbook.cli.compose import groups, scales, summary_line

EXAMPLES = """\
Examples
  python -m cookbook.run recipe=gsm8k_grpo
  python -m cookbook.run recipe=gsm8k_grpo model=smollm2 dataset=gsm8k loop.max_tokens=256
  python -m cookbook.run -m recipe=gsm8k_grpo optim.learning_rate=3e-4,1e-3 seed=0,1
"""

SETTINGS = """\
Settings (key=value; all of them: --cfg job)
  seed=0  run_dir=DIR  resume=never|auto|DIR  debug=true
  model.path=DIR  dataset.path=DIR
  loop.steps  loop.groups_per_batch  loop.group_size  loop.max_tokens  loop.temperature  loop.num_substeps  loop.kl_penalty_coef
  optim.learning_rate  lora.rank  lora.alpha
  eval.every  eval.examples  checkpoint.every  checkpoint.keep  budget.max_usd  budget.max_tokens
"""

FLAGS = """\
Flags
  -m           run once for each combination of values separated by commas; finished jobs are skipped when it is repeated
  --cfg job    print the configuration and stop
  --debug      show the traceback of an error as well (the same as debug=true)
  --hydra-help what Hydra itself can do
"""


def usage() -> str:
    """The groups and their options, the most useful settings, and examples."""
    lines = ["usage: python -m cookbook.run recipe=NAME [group=option ...] [key=value ...]", "", EXAMPLES]
    lines.append("Groups (group=option)")
    for group, names in groups().items():
        if group in ("recipe", "sweep"):
            continue
        lines.append(f"  {group:<10} {', '.join(names)}")
    lines += ["", "Recipes (recipe=NAME)"]
    for recipe in groups()["recipe"]:
        lines.append(f"  {recipe}: {summary_line('recipe', recipe)} (scale={'|'.join(scales(recipe))})")
    lines += ["", "Sweeps (+sweep=NAME)"]
    lines += [f"  {sweep}: {summary_line('sweep', sweep)}" for sweep in groups()["sweep"]]
    return "\n".join([*lines, "", SETTINGS, FLAGS]).rstrip() + "\n"
