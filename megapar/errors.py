"""Errors for people: each class has an exit code, each message is one line saying what, where, why and what would
work."""


class MegaparError(Exception):
    """Base of every error that a user can cause or mend; printed without a traceback."""

    exit_code = 70


class ConfigError(MegaparError):
    exit_code = 2


class DataError(MegaparError):
    exit_code = 3


class CheckpointError(MegaparError):
    exit_code = 4


class NumericError(MegaparError):
    exit_code = 5


class CommunicationError(MegaparError):
    exit_code = 6


class StorageError(MegaparError):
    exit_code = 7
