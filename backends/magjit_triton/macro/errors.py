"""What can be wrong with macro-kernels; each names the reason and the way out."""

from __future__ import annotations

from magjit.plugin import BackendError

__all__ = [
    "CorruptRepositoryError",
    "ForeignRepositoryError",
    "MacroKernelError",
    "MissingTunerError",
    "NewerRepositoryError",
    "NoDeviceError",
    "RepositoryError",
    "RepositoryFullError",
    "UnknownFamilyError",
]


class MacroKernelError(BackendError):
    """Base of what macro-kernels raise."""


class NoDeviceError(MacroKernelError):
    """Something must be measured or launched, and there is no CUDA device."""


class UnknownFamilyError(MacroKernelError, LookupError):
    """No family has the given name."""


class MissingTunerError(MacroKernelError, ImportError):
    """The packages of the extra ``tune`` are not installed."""


class RepositoryError(MacroKernelError):
    """A repository cannot be used; products go on without it."""


class CorruptRepositoryError(RepositoryError):
    """The file is damaged, or what it holds is not what was written."""


class ForeignRepositoryError(RepositoryError):
    """The file is something else, or was made for another device or another Triton."""


class NewerRepositoryError(RepositoryError):
    """The file was written by a newer version of MagJIT."""


class RepositoryFullError(RepositoryError):
    """The file would exceed its bound."""
