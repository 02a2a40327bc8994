"""Prompt datasets: problems to sample completions for, each with the answer that a reward compares with.

`answers` reads rows with a prompt and an answer column. Programming problems are prompts too; see `cookbook.data.code`.
"""
