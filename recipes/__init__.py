"""Recipes: what to run, what to expect, and code only where a recipe needs its own."""
