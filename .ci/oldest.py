"""Prints each dependency pinned to the lower bound in pyproject.toml."""

import re
import tomllib

with open("pyproject.toml", "rb") as file:
    dependencies = tomllib.load(file)["project"]["dependencies"]
for dependency in dependencies:
    name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", dependency).groups()
    print(f"{name}=={bound}.*")
