"""Datasets by kind, the order in which a run goes through them, curricula, and rendering to tokens.

`source` reads rows from files or the hub for all kinds, `kinds` holds the protocols that a dataset of your own must
satisfy.
"""
