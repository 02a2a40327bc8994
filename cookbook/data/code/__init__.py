"""Programming problems with tests, from the formats in which they are published; they are prompt datasets.

One module for each format: `json_problems` (APPS, TACO, DeepCoder, PrimeIntellect), `livecodebench`, `code_contests`,
`mbpp`, `humaneval`, and `problem_packages` of programming contests. `rows` has what they share.
"""
