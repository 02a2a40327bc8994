"""Preference datasets: what people or models like better.

`pairs` reads a better and a worse completion of each prompt (DPO and its relatives), `labelled` single completions that
are labelled desirable or not (KTO), and `rows` parses the usual layouts of a row.
"""
