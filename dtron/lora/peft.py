"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

PEFT names the factors of a module M of transformers `base_model.model.M.lora_A.weight` (rank, in)
and `...lora_B.weight` (out, rank), and DoRA's magnitudes `...lora_magnitude_vector` (out,), as
dtron's are shaped. So only matrices that transformers has as one linear layer of the same layout
have names there: not stacked experts, nor layers that transformers fuses, transposes or permutes.

Source: peft.LoraConfig, PEFT's documentation of the checkpoint format.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dtron.config import Lora
from dtron.errors import CheckpointError, counted
from dtron.io.filesystem import read_json
from dtron.io.safetensors_file import Region, StoredTensors, full_region, reading
from dtron.lora.adapters import Adapted
from dtron.models.config import DecoderConfig
from dtron.models.hf import HuggingFace
from dtron.models.hf_weights import locate

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAMES = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
"""Ends of PEFT's names, in the order of `Adapted.parameters`."""
_FALSE = (
    *("rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out"),
    *("lora_bias", "target_parameters", "layer_replication", "trainable_token_indices"),
    *("alora_invocation_tokens", "use_qalora"),
)
"""Keys of adapter_config.json that dtron supports only if they are false or empty."""
_UNCHANGED = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of init_lora_weights that leave the base weights as they are; the others, such as "pissa",
subtract the adapter's first product from them."""


def module_of(hf: HuggingFace, model: DecoderConfig, adapted: Adapted) -> str:
    """Return the module of transformers that an adapter belongs to.

    Raises:
        CheckpointError: PEFT has no name for the adapter.
    """
    found = locate(hf, model, adapted.weight, adapted.shape)
    if found.stacked or found.name.transposed or found.name.rows or len(adapted.shape) > 2:
        raise CheckpointError(
            f"{adapted.name} is no linear layer of its own in {hf.architecture} of transformers, "
            "so PEFT has no name for its adapter; use dtron convert to-hf, which merges adapters, "
            "or lora.modules without it"
        )
    return found.theirs.removesuffix(".weight")


def tensor_names(
    hf: HuggingFace, model: DecoderConfig, adapted: Iterable[Adapted], lora: Lora
) -> dict[str, str]:
    """Return {FQN of a parameter: its name in PEFT's file}; errors: those of `module_of`."""
    found = {}
    for each in adapted:
        module = module_of(hf, model, each)
        for fqn, end in zip(each.parameters(lora), _NAMES, strict=False):
            found[fqn] = f"{_PREFIX}{module}.{end}"
    return found


def config_json(
    hf: HuggingFace, model: DecoderConfig, adapted: Iterable[Adapted], lora: Lora, base: str
) -> dict:
    """Return the content of adapter_config.json.

    Args:
        base: folder or name of the weights that the adapter belongs to; empty: unknown.
    """
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if model.encoder_layers else "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": alpha,
        "use_rslora": lora.rank_stabilized,
        "use_dora": lora.dora,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": [module_of(hf, model, each) for each in adapted],
    }


@dataclass(frozen=True)
class _Factor:
    """Place of a factor in the file."""

    theirs: str
    shape: tuple[int, ...]


class PeftFolder:
    """Reader of an adapter in PEFT's format, for a model with these adapters.

    Attributes:
        path: the folder.
        ours: {FQN of a factor: its place in the file}.
    Raises:
        CheckpointError: the folder is of another model or has other adapters; the message names the
            file and the key or tensor.
    """

    def __init__(
        self,
        path: Path,
        hf: HuggingFace,
        model: DecoderConfig,
        adapted: Iterable[Adapted],
        lora: Lora,
    ) -> None:
        self.path, self.file, adapted = path, path / WEIGHTS, list(adapted)
        if not (path / CONFIG).is_file() or not self.file.is_file():
            raise CheckpointError(
                f"lora.initial = {str(path)!r} lacks {CONFIG} or {WEIGHTS}; name a folder that "
                "PEFT or dtron convert to-peft has written"
            )
        self._check_config(read_json(path / CONFIG), lora)
        names = tensor_names(hf, model, adapted, lora)
        shapes = {fqn: shape for each in adapted for fqn, shape in each.parameters(lora).items()}
        self.ours = {fqn: _Factor(names[fqn], shape) for fqn, shape in shapes.items()}
        with reading(self.file):
            stored = StoredTensors(self.file)
            self._tensors = {key: stored.get_slice(key) for key in sorted(stored.keys())}
        self._check_tensors()

    def dtype(self, fqn: str) -> torch.dtype:
        """Return the dtype of a factor in the file."""
        return self._tensors[self.ours[fqn].theirs].dtype

    def read(self, fqn: str, region: Region | None = None) -> Tensor:
        """Read a region of a factor to the host, in its stored dtype; None: the whole factor."""
        each = self.ours[fqn]
        with reading(self.file):
            return self._tensors[each.theirs][region or full_region(each.shape)]

    def _check_config(self, given: Mapping[str, Any], lora: Lora) -> None:
        wanted = {"r": lora.rank, "lora_alpha": lora.alpha}
        wanted |= {"use_rslora": lora.rank_stabilized, "use_dora": lora.dora}
        keys = dict(zip(wanted, ("rank", "alpha", "rank_stabilized", "dora"), strict=True))
        if given.get("peft_type") != "LORA":
            raise CheckpointError(
                f"{self.path / CONFIG}: peft_type = {given.get('peft_type')!r} is not LORA"
            )
        for key, value in wanted.items():
            theirs = given.get(key, False)
            if theirs != value:
                legal = isinstance(theirs, bool) == isinstance(value, bool) and theirs is not None
                fix = f"set lora.{keys[key]}={json.dumps(theirs)}" if legal else "mend the file"
                raise CheckpointError(
                    f"{self.path / CONFIG}: {key} = {theirs!r}, but lora.{keys[key]} = {value!r}; "
                    f"{fix}"
                )
        for key in _FALSE:
            if given.get(key):
                raise CheckpointError(
                    f"{self.path / CONFIG}: {key} = {given[key]!r} is not supported by dtron"
                )
        if (init := given.get("init_lora_weights")) not in _UNCHANGED:
            raise CheckpointError(
                f"{self.path / CONFIG}: init_lora_weights = {init!r} belongs to changed base "
                "weights; save it with PEFT's path_initial_model_for_weight_conversion"
            )
        if given.get("bias", "none") != "none":
            raise CheckpointError(
                f"{self.path / CONFIG}: bias = {given['bias']!r}: dtron trains no biases"
            )

    def _check_tensors(self) -> None:
        wanted = {each.theirs: each for each in self.ours.values()}
        fix = "set lora.modules to the modules of the adapter, or name an adapter of this model"
        problems = {
            "is missing": sorted(wanted.keys() - self._tensors.keys()),
            "is unexpected: the run has no such adapter": sorted(
                self._tensors.keys() - wanted.keys()
            ),
        }
        for problem, names in problems.items():
            if names:
                more = f" (and {counted(len(names) - 1, 'other')})" if len(names) > 1 else ""
                raise CheckpointError(f"{self.file}: {names[0]}{more} {problem}; {fix}")
        for name, each in wanted.items():
            if (shape := self._tensors[name].shape) != list(each.shape):
                raise CheckpointError(
                    f"{self.file}: {name} has shape {shape}, but the model needs "
                    f"{list(each.shape)}: it is an adapter of another model"
                )
