"""Check that settings, code and data are equal on all ranks, before the model is built.

Different values would make training wrong without an error, or let it fail in a collective.
"""

import functools
import hashlib
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtron
from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models.config import DecoderConfig

_PACKAGES = ("torch", "torchao", "triton")
_COMPARED_RESOLVED = ("data.paths", "data.tokenizer", "data.cache_dir", "model.override")
"""Keys that may differ: instead of them, contents of files and the resolved model are compared."""
_MAX_SHOWN = 5
"""Maximum number of differences that an error names."""


def common_to_ranks(
    config: RunConfig, model: DecoderConfig, data: dict[str, str]
) -> dict[str, Any]:
    """Return everything that must be equal on all ranks, as name -> value.

    Args:
        model: the resolved model config.
        data: result of `dtron.data.identity_of`.
    """
    sections = config.model_dump(mode="json")
    keys = {f"{name}.{key}": v for name, keys in sections.items() for key, v in keys.items()}
    found = {key: value for key, value in keys.items() if key not in _COMPARED_RESOLVED}
    found |= {f"model.override.{key}": v for key, v in model.model_dump(mode="json").items()}
    found |= {f"the version of {name}": _installed(name) for name in _PACKAGES}
    found |= {"the version of CUDA": torch.version.cuda, "dtron's source code": _source()}
    for key in ("data.mixture", "data.validation"):
        found[key] = [{k: v for k, v in each.items() if k != "paths"} for each in found[key]]
    return found | {_name_of(key): value for key, value in data.items()}


def _name_of(key: str) -> str:
    """Return how a key of `identity_of` is named in an error."""
    kind, _, source = key.partition(":")
    names = {"content": "the training data", "validation": "the validation data"}
    name = names.get(kind, f"the {kind}")
    return f"{name} of {source}" if source else name


def check_agreement_of_ranks(mine: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Compare this rank's values with those of all other ranks; all ranks call it together.

    Args:
        group: process group of all ranks for CPU tensors.
    Raises:
        ConfigError: on all ranks, if values differ; names the values and their ranks.
    """
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    found: list[tuple[str, dict[str, Any]]] = [("", {})] * len(digests)
    dist.all_gather_object(found, (platform.node(), mine), group=group)
    names = dict.fromkeys(name for _, values in found for name in values)
    differing = [n for n in names if len({json.dumps(v.get(n)) for _, v in found}) > 1]
    lines = [_difference(name, found) for name in differing[:_MAX_SHOWN]]
    more = f"; and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
    raise ConfigError(
        f"ranks disagree on {'; on '.join(lines)}{more}; start all of them with the same command, "
        "files and versions"
    )


def _difference(name: str, found: list[tuple[str, dict[str, Any]]]) -> str:
    """Format one difference: `parallel.tp: 2 on ranks 0, 1 (host a), 4 on rank 2 (host b)`."""
    by_value: dict[str, list[int]] = {}
    for rank, (_, values) in enumerate(found):
        by_value.setdefault(json.dumps(values.get(name)), []).append(rank)
    groups = []
    for value, ranks in by_value.items():
        hosts = ", ".join(dict.fromkeys(found[rank][0] for rank in ranks))
        word = "rank" if len(ranks) == 1 else "ranks"
        groups.append(f"{value} on {word} {', '.join(map(str, ranks))} ({hosts})")
    return f"{name}: {', '.join(groups)}"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@functools.cache
def _source() -> str:
    """Return the SHA-256 of all Python files of the package."""
    content = hashlib.sha256()
    root = Path(dtron.__file__).parent
    for folder, folders, files in os.walk(root, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                content.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return content.hexdigest()
