"""The configuration of a run: strict, with one effective value a key and the place that value came from."""

from .identity import FORK_FIXED, changed_below, config_hash, identity_hash, resume_diff
from .keys import KeyInfo, all_keys
from .load import LoadedConfig, load_config, without_secrets
from .masking import mask
from .provenance import Provenance
from .serialize import config_from_json, flatten, to_json, to_yaml

__all__ = [
    "FORK_FIXED",
    "KeyInfo",
    "LoadedConfig",
    "Provenance",
    "all_keys",
    "changed_below",
    "config_from_json",
    "config_hash",
    "flatten",
    "identity_hash",
    "load_config",
    "mask",
    "resume_diff",
    "to_json",
    "to_yaml",
    "without_secrets",
]
