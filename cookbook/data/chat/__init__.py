"""Chat datasets: whole conversations for supervised fine-tuning.

`rows` parses the usual layouts of a row, `dataset` reads them.
"""
