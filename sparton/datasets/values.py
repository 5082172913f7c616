"""Values of records: JSON and numbers, each of them what was written or refused."""

import json
import re
from decimal import Decimal
from textwrap import shorten
from typing import Any

import numpy as np

from sparton.datasets.files import RecordError, decode_text
from sparton.reading import RepeatedKeyError, without_repetition

_NUMBER = re.compile(r"\s*[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?\s*", re.IGNORECASE)
# json.loads would make one for every record.
_DECODER = json.JSONDecoder(object_pairs_hook=without_repetition)
_LARGEST = float(np.finfo(np.float32).max)


def decode_json(line: bytes) -> Any:
    """The line's JSON value, all of whose texts can be written as UTF-8; see :func:`parse_json`."""
    text = decode_text(line)
    value = parse_json(text, " (one record per line is expected)")
    if "\\u" in text and ("\\ud" in text or "\\uD" in text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RecordError(f"half of a surrogate pair in a text: {error}") from error
        except RecursionError as error:
            raise RecordError("JSON nested too deeply") from error
    return value


def parse_json(text: str, hint: str = "") -> Any:
    """The value of JSON. RecordError says why there is none, with a hint, and refuses a key that
    an object has twice, whose first value would be lost."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"not JSON{hint}: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise RecordError("JSON nested too deeply") from error
    except RepeatedKeyError as error:
        raise RecordError(f"the key {error.key!r} occurs twice: leave one of them out") from error
    except ValueError as error:  # Python reads no integer of more than 4300 digits
        raise RecordError("JSON with an integer of thousands of digits") from error


def parse_number(value: Any) -> float:
    """A number that fp32 can hold, or a text that is one.

    Raises:
        RecordError: anything else, true and false among it.
    """
    if type(value) is float and abs(value) <= _LARGEST:  # nearly all are
        return value
    number = value
    if isinstance(value, Decimal) or (isinstance(value, str) and _NUMBER.fullmatch(value)):
        number = float(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise RecordError(f"{shown(value)} is not a number")
    if not abs(number) <= _LARGEST:  # nor is NaN
        raise RecordError(f"{shown(value)} is not finite in fp32")
    return float(number)


def shown(value: Any) -> str:
    """A value in a message, whatever its size; what it holds is left out."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict | tuple):
        return f"a {type(value).__name__}"
    return shorten(repr(value), 80)
