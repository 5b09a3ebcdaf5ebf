"""Versions of torch that dtron is tested with."""

from importlib.metadata import version as installed

from dtron.errors import note

TORCH = ("2.11", "2.15")
"""Oldest and newest tested version; pyproject.toml names the same versions."""


def warn_untested() -> None:
    """Print a warning on rank 0 if the installed torch is not tested with dtron.

    Only the package metadata is read, since importing torch takes seconds.
    """
    if message := untested(installed("torch")):
        note(message, "warning")


def untested(version: str) -> str:
    """Return the warning for a version such as 2.16.0+cpu; empty: the version is tested."""
    first, last = map(release, TORCH)
    if first <= release(version) <= last:
        return ""
    shown = version.partition("+")[0]
    return f"torch {shown} is not tested with dtron ({' to '.join(TORCH)}); continuing"


def release(version: str) -> tuple[int, int]:
    """Return (2, 16) for a version such as 2.16.0+cpu."""
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
