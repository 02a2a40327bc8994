"""Generated datasets: no file, no network, and every item is a function of (seed, split, index) alone.

`word_problems` and `tiny_programs` are prompts, `small_talk` and `worked` are chats, `courtesy` is preference pairs. No
training item is a held-out one, whatever the seeds.
"""
