"""The error tree. Messages say what was found, what was expected and what to do."""


class KVTCError(Exception):
    """Root of every error this package raises on purpose."""


class ConfigError(KVTCError, ValueError):
    """A flag or configuration value is wrong; the message names the key and the fix."""


class UnsupportedError(KVTCError, NotImplementedError):
    """A model, cache or engine this package refuses, by name."""


class ArtifactError(KVTCError):
    """A calibration artifact is missing, damaged, or made for something else."""


class BitstreamError(KVTCError):
    """A frame cannot be decoded. To the tier this is a cache miss, never a crash."""


class TruncatedFrame(BitstreamError):
    """The frame is shorter (or longer) than its header declares."""


class UnsupportedVersion(BitstreamError):
    """The frame's magic, version, kind, coder or flags are unknown to this reader."""


class ChecksumMismatch(BitstreamError):
    """Stored bytes changed since the frame was written."""


class GeometryMismatch(BitstreamError):
    """The frame belongs to another model geometry, artifact, plan or position."""


class CellPoolError(KVTCError):
    """Slots were given to a cell pool that it cannot apply them to; nothing was changed."""


class RestoreError(KVTCError):
    """A restore failed after its frames were verified (out of memory, or a bug of ours)."""
