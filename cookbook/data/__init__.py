"""Datasets by kind (prompts, chat, preference pairs, labelled completions), their order in a run, and rendering to
tokens.

`source` reads rows from files or the hub for all kinds, `kinds` holds the protocols that a dataset of your own must
satisfy.
"""
