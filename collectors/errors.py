"""The errors Forewarn raises on purpose. Anything else that escapes is a bug.

ForewarnError
├── ConfigError          a setting is wrong: names file, key and the way out
├── UnavailableError     a source cannot be read here: names the source and the way out
├── InputError           data that came in is not what it must be: names the field
└── StorageError         something could not be kept on disk
"""

from __future__ import annotations


class ForewarnError(Exception):
    """Base of all errors that Forewarn raises on purpose; its text is meant for the user."""


class ConfigError(ForewarnError):
    """A setting is wrong. The text names the file (and line where known), the key, and the way out."""


class UnavailableError(ForewarnError):
    """A source cannot be read on this host. The text names the source, why, and the way out."""


class InputError(ForewarnError):
    """Data from outside is not what it must be. The text names the file or field."""


class StorageError(ForewarnError):
    """Something could not be kept on disk (full, read-only, damaged)."""
