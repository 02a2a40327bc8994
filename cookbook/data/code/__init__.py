"""Programming problems with tests, from the formats in which they are published."""
