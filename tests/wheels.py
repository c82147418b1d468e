"""Released versions of other projects, unpacked for a process of its own; none is installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


def unpacked(distribution: str, version: str, cache: Path, *options: str) -> Path:
    """The folder with the wheel's packages, without its dependencies; skips without an index.

    `options` are pip download's, for a wheel that pip would not choose.
    """
    folder = cache / f"{distribution}-{version}"
    if folder.exists():
        return folder
    wheels = cache / f"{distribution}-{version}.download"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels]
    command += [*options, f"{distribution}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        pytest.skip(f"pip cannot download {distribution}=={version}: {lines[-1]}")
    (wheel,) = wheels.glob("*.whl")
    partial = folder.with_suffix(".partial")
    zipfile.ZipFile(wheel).extractall(partial)
    partial.rename(folder)
    return folder


@pytest.fixture(scope="session")
def wheel_cache(pytestconfig: pytest.Config) -> Path:
    """Kept between runs, in pytest's own cache."""
    return pytestconfig.cache.mkdir("wheels")
