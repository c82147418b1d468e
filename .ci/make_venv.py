"""make_venv.py FOLDER: makes a virtual environment that has pip, with the standard library alone.

Debian's python3 has no ensurepip until python3-venv is installed; then pip comes from the index
that pip itself would use (PIP_INDEX_URL, pip.conf, PyPI).
"""

import configparser
import hashlib
import os
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import venv

if sys.version_info < (3, 10):  # noqa: UP036 - this is where an older one learns it
    sys.exit(
        f"automodel-rms-norm needs Python 3.10 or later, and {sys.executable} is "
        f"{sys.version.split()[0]}. Choose another, for example: make PYTHON=python3.11"
    )


def pip_option(name: str, default: str) -> str:
    config = configparser.RawConfigParser()
    config.read(
        [
            "/etc/pip.conf",
            os.path.expanduser("~/.pip/pip.conf"),
            os.path.expanduser("~/.config/pip/pip.conf"),
            os.environ.get("PIP_CONFIG_FILE", os.devnull),
        ]
    )
    default = config.get("global", name, fallback=default)
    return os.environ.get("PIP_" + name.upper().replace("-", "_"), default)


def runs_here(requires_python: str) -> bool:
    lower = re.search(r">=\s*(\d+)\.(\d+)", requires_python)
    return not lower or sys.version_info[:2] >= (int(lower[1]), int(lower[2]))


def download_pip(folder: str) -> str:
    """The newest pip wheel of the index, checked against the index's hash."""
    context = ssl.create_default_context(cafile=pip_option("cert", "") or None)

    def read(url: str) -> bytes:
        with urllib.request.urlopen(url, context=context, timeout=60) as response:
            return response.read()

    page_url = pip_option("index-url", "https://pypi.org/simple").rstrip("/") + "/pip/"
    wheels = {}
    for tag in re.findall(r"<a\s[^>]*>", read(page_url).decode()):
        url = re.search(r'href="([^"]+)"', tag)
        name = url and re.search(r"/(pip-(\d+(?:\.\d+)*)-py3-none-any\.whl)(?:#|$)", url[1])
        requires = re.search(r'data-requires-python="([^"]*)"', tag)
        python = requires[1].replace("&gt;", ">") if requires else ""
        if name and "data-yanked" not in tag and runs_here(python):
            wheels[tuple(map(int, name[2].split(".")))] = (name[1], url[1])
    if not wheels:
        sys.exit("no pip wheel for this Python at " + page_url)
    name, url = wheels[max(wheels)]
    content = read(urllib.parse.urljoin(page_url, url))
    expected = re.search(r"#sha256=([0-9a-f]{64})", url)
    if expected and hashlib.sha256(content).hexdigest() != expected[1]:
        sys.exit("the download of " + name + " does not have the hash that the index names")
    path = os.path.join(folder, name)
    with open(path, "wb") as file:
        file.write(content)
    return path


def main(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = os.path.join(folder, "bin", "python")
    ensurepip = [python, "-m", "ensurepip", "--default-pip"]
    if subprocess.run(ensurepip, capture_output=True).returncode == 0:
        return
    with tempfile.TemporaryDirectory() as temporary:
        wheel = download_pip(temporary)
        subprocess.run(
            [python, os.path.join(wheel, "pip"), "install", "--quiet", wheel], check=True
        )


main(sys.argv[1])
