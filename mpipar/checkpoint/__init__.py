"""Checkpoints: written by all ranks, whole or not there, read by any layout."""

from mpipar.checkpoint.copies import Copies, save_copies
from mpipar.checkpoint.folder import (
    checkpoints,
    find_checkpoint,
    is_complete,
    remove_drafts,
    step_of,
)
from mpipar.checkpoint.fragments import Fragment, fragments_of, whole_fragments
from mpipar.checkpoint.inspect import Damage, Entry, Verdict, look, verify
from mpipar.checkpoint.load import load
from mpipar.checkpoint.manifest import MANIFEST, Manifest, Progress, read_manifest
from mpipar.checkpoint.reshard import Resharded, reshard
from mpipar.checkpoint.saver import Facts, Saved, Saver

__all__ = [
    "MANIFEST",
    "Copies",
    "Damage",
    "Entry",
    "Facts",
    "Fragment",
    "Manifest",
    "Progress",
    "Resharded",
    "Saved",
    "Saver",
    "Verdict",
    "checkpoints",
    "find_checkpoint",
    "fragments_of",
    "is_complete",
    "load",
    "look",
    "read_manifest",
    "remove_drafts",
    "reshard",
    "save_copies",
    "step_of",
    "verify",
    "whole_fragments",
]
