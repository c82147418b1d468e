"""requirements.py NAME...: pyproject.toml's requirements, one a line.

A name is `build` (what compiles the package), `run` (what it needs) or one of its extras. So
everything but the package is installed first, and torch is there when the package is compiled.
"""

import sys

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

with open("pyproject.toml", "rb") as file:
    pyproject = tomllib.load(file)
project = pyproject["project"]
requirements = {
    "build": pyproject["build-system"]["requires"],
    "run": project["dependencies"],
    **project["optional-dependencies"],
}


def expand(name: str) -> list[str]:
    itself = f"{project['name']}["
    result = []
    for requirement in requirements[name]:
        if requirement.startswith(itself):
            result += expand(requirement.removeprefix(itself).rstrip("]"))
        else:
            result.append(requirement)
    return result


print("\n".join(requirement for name in sys.argv[1:] for requirement in expand(name)))
