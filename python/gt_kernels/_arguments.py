"""Checks of options that have the wrong type."""

import operator

from . import c


def refuse(function, text, status=c.GT_ERROR_VALUE):
    kind = c.UnsupportedError if status // 100 == 2 else c.ArgumentError
    raise kind(status, f"{function}: {text}")


def flag(function, name, value):
    if isinstance(value, int) and (value == 0 or value == 1):
        return int(value)
    refuse(function, f"{name} = {value!r}: must be True or False")


def integer(function, name, value):
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except TypeError:
        refuse(function, f"{name} = {value!r}: must be an integer")


def number(function, name, value):
    if isinstance(value, float):
        return value
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            pass
    refuse(function, f"{name} = {value!r}: must be a number")
