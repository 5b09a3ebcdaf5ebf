"""Versions of torch that dtron is tested with, and of packages that it can use."""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

from dtron.errors import note

TORCH = ("2.11", "2.15")
"""Oldest and newest tested version; pyproject.toml names the same versions."""

FLA = (0, 5)
"""Oldest version of flash-linear-attention: earlier kernels take as many key as value heads, and
compute wrong results for other numbers without an error."""


def has_fla() -> bool:
    """Whether flash-linear-attention is installed, in a version from `FLA` on."""
    try:
        return release(installed("fla-core")) >= FLA
    except PackageNotFoundError:
        return False


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
