"""Recipes: a README for each (command and expected results), and code only where a recipe needs its own."""
